/* Attention of queries over the pages of their row, in place.
 *
 * The keys of a row are gone over in blocks of BLOCK tokens with an online softmax, and blocks make up segments of
 * SEGMENT tokens that are summed apart and merged in order. Both lie at fixed positions from the row's start, and each
 * query's sums take tokens in one fixed order in which a masked token is an exact zero. So a query's result does not
 * depend, in any bit, on the queries beside it, on how its prompt was cut into steps, or on the number of threads:
 * a token decoded alone and the same token prefilled again with its context give the same.
 *
 * Queries go four at a time: a vector of scores holds LANES / 4 tokens of four queries, lane = token * 4 + query. */

#ifndef APH_ATTENTION_H
#define APH_ATTENTION_H

#include "vector.h"

#define BLOCK 32
#define SEGMENT 256
#define QUAD 4
#define TOKENS (LANES / QUAD) /* tokens in a vector of scores */
#define ITEM_QUERIES 64       /* queries that share a pass over the keys, unless one token has more */

/* Keys and values of one layer, and where a row's tokens are in them. */
typedef struct {
    int type;
    const char *keys, *values; /* [pages, page_size, kv_heads, head_dim] */
    long page_size;
    long token_bytes; /* from one token to the next within a page */
    const int32_t *table;
} pages;

/* Lines of memory that will be needed soon, fetched into the cache one at a time between other work: many at once would
 * be dropped. Token by token with all heads, as they lie: memory is much faster read in a row. */
typedef struct {
    const char *const *tokens; /* those not begun yet: `left` */
    long left;
    const char *line, *end; /* of the token begun */
    long at, bytes;         /* what is needed of each token */
} fetch;

ALWAYS void fetch_line(fetch *f)
{
    if (f->line >= f->end) {
        if (!f->left)
            return;
        f->left--;
        f->line = *f->tokens++ + f->at;
        f->end = f->line + f->bytes;
    }
    __builtin_prefetch(f->line, 0, 2);
    f->line += 64;
}

/* Softmax so far of four queries: largest score (in powers of two), and sum of 2^(score - largest). Lanes of the same
 * query agree. */
typedef struct {
    vec most, sum;
} softmax;

/* Room for one item, made once per thread. `width` is head_dim rounded up to CHUNK. */
typedef struct {
    float *part;                 /* [heads][count][width] sums of the running segment, not divided yet */
    float *whole;                /* the same of the segments before it */
    softmax *part_of, *whole_of; /* [heads][quads of count] */
    char *keys, *values;         /* [BLOCK][width] copies, when head_dim is not a multiple of CHUNK; 0 beyond it */
} attention_room;

/* Queries of one row: consecutive tokens, for consecutive KV heads. */
typedef struct {
    const float *const *q; /* [heads][count] pointers to [width]: scaled, in the order of `load_pair` */
    long heads;            /* KV heads */
    long count;            /* queries of one KV head: token by token */
    long per_token;        /* of them, those of one token */
    long first;            /* position of the first token */
    long window;           /* tokens that a query sees, or 0 for all */
    long head_dim, width;
} query_set;

/* Up to BLOCK consecutive tokens of a row, from position `base` on. */
typedef struct {
    long base, count;
    const char *keys[BLOCK], *values[BLOCK];
} token_block;

ALWAYS long lowest(const query_set *q, long position)
{
    return q->window && position >= q->window ? position - q->window + 1 : 0;
}

/* Scores of `count` queries (a constant) against TOKENS tokens, whose keys are `at` bytes from k. */
ALWAYS vec scores(int count, int type, const float *const *q, const char *const *k, long at, long width)
{
    const long step = CHUNK * (long)dtype_size(type);
    vec sum[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        sum[i] = splat(0.0f);
    for (long d = 0; d < width; d += CHUNK, at += step) {
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) {
            vec lo, hi;
            load_pair(type, k[t] + at, &lo, &hi);
#pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                sum[t * QUAD + i] += load(q[i] + d) * lo;
                sum[t * QUAD + i] += load(q[i] + d + LANES) * hi;
            }
        }
    }
    return sum_each(sum);
}

/* Spreads over its query's lanes the largest or the sum. */
ALWAYS vec across_tokens(vec v, bool largest)
{
#if LANES == 8
    vec other = SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    return largest ? at_least(v, other) : v + other;
#elif LANES == 16
    vec other = SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v = largest ? at_least(v, other) : v + other;
    other = SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return largest ? at_least(v, other) : v + other;
#else
    (void)largest;
    return v;
#endif
}

/* What a largest score is subtracted as: nothing seen yet would be infinity minus infinity. */
ALWAYS vec finite_base(vec most) { return choose(most == -INFINITY, splat(0.0f), most); }

/* sums = sums * fade + weights times values, for `chunks` (a constant) chunks of head_dim, `at` bytes from v. */
ALWAYS void add_values(int count, int type, int chunks, long width, const char *const *v, long at, long low, long high,
                       const float *weight, vec fade, fetch *ahead, float *sums)
{
    const long step = CHUNK * (long)dtype_size(type);
    vec out[QUAD][8];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * chunks; j++)
            out[i][j] = load(sums + i * width + j * LANES) * fade[i];
    for (long t = low; t < high; t++) {
        if (ahead && t * chunks * step % 64 == 0)
            for (long line = 0; line < chunks * step; line += 64)
                fetch_line(ahead);
#pragma GCC unroll 4
        for (int j = 0; j < chunks; j++) {
            vec lo, hi;
            load_pair(type, v[t] + at + j * step, &lo, &hi);
#pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                out[i][2 * j] += weight[t * QUAD + i] * lo;
                out[i][2 * j + 1] += weight[t * QUAD + i] * hi;
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * chunks; j++)
            store(sums + i * width + j * LANES, out[i][j]);
}

/* `count` queries (a constant), from number `first_query` of a KV head on, against a block of tokens. The head's keys
 * and values are `at` bytes from where the block points. Fetches as much as it reads of ahead[0], keys, and ahead[1],
 * values, unless `ahead` is NULL. */
ALWAYS void quad_block(int count, int type, const query_set *qs, const float *const *q, long first_query,
                       const token_block *block, long at, fetch *ahead, softmax *state, float *sums)
{
    const long base = block->base;
    const char *const *k = block->keys, *const *v = block->values;
    const long first = qs->first + first_query / qs->per_token;
    const long last = qs->first + (first_query + count - 1) / qs->per_token;
    const long low = lowest(qs, first) > base ? lowest(qs, first) - base : 0;
    const long high = last - base + 1 < block->count ? last - base + 1 : block->count;
    if (low >= high)
        return;
    const long step = CHUNK * (long)dtype_size(type), bytes = qs->head_dim * (long)dtype_size(type);
    const int wide = count == 1 ? 4 : count == 2 ? 2 : 1; /* chunks of values at once: enough sums to hide latency */
    const bool masked = base + (high + TOKENS - 1) / TOKENS * TOKENS - 1 > first || base < lowest(qs, last);
    ivec position = {0}, window_low = {0}, offset = {0};
    for (int i = 0; masked && i < LANES; i++) {
        const long query = i % QUAD < count ? first_query + i % QUAD : first_query;
        const long token = qs->first + query / qs->per_token;
        position[i] = (int32_t)(token - base);
        window_low[i] = (int32_t)(lowest(qs, token) - base);
        offset[i] = i / QUAD;
    }

    float weight[BLOCK * QUAD];
    vec most = splat(-INFINITY);
    for (long t = low / TOKENS * TOKENS; t < high; t += TOKENS) {
        if (ahead)
            for (long line = 0; line < TOKENS * bytes; line += 64)
                fetch_line(&ahead[0]);
        vec s = scores(count, type, q, k + t, at, qs->width);
        if (masked) {
            const ivec token = offset + (int32_t)t;
            s = choose((token <= position) & (token >= window_low), s, splat(-INFINITY));
        }
        store(weight + t * QUAD, s);
        most = at_least(most, s);
    }
    most = at_least(across_tokens(most, true), state->most);
    const vec floor = finite_base(most);
    const vec fade = exp2_vec(state->most - floor);
    vec sum = splat(0.0f);
    for (long t = low / TOKENS * TOKENS; t < high; t += TOKENS) {
        vec p = exp2_vec(load(weight + t * QUAD) - floor);
        store(weight + t * QUAD, p);
        sum += p;
    }
    state->most = most;
    state->sum = state->sum * fade + across_tokens(sum, false);

    long d = 0;
    for (; wide > 1 && d + wide * CHUNK <= qs->width; d += wide * CHUNK, at += wide * step)
        add_values(count, type, wide, qs->width, v, at, low, high, weight, fade, ahead ? ahead + 1 : NULL, sums + d);
    for (; d < qs->width; d += CHUNK, at += step)
        add_values(count, type, 1, qs->width, v, at, low, high, weight, fade, ahead ? ahead + 1 : NULL, sums + d);
}

typedef void quad_function(const query_set *qs, const float *const *q, long first_query, const token_block *block,
                           long at, fetch *ahead, softmax *state, float *sums);

#define EACH_COUNT(of, type) of(1, type) of(2, type) of(3, type) of(4, type)
#define DEFINE_QUAD(count, type)                                                                                       \
    static void quad_block_##count##_##type(const query_set *qs, const float *const *q, long first_query,              \
                                            const token_block *block, long at, fetch *ahead, softmax *state,           \
                                            float *sums)                                                               \
    {                                                                                                                  \
        quad_block(count, type, qs, q, first_query, block, at, ahead, state, sums);                                    \
    }
#define NAME_QUAD(count, type) quad_block_##count##_##type,

EACH_COUNT(DEFINE_QUAD, F32)
EACH_COUNT(DEFINE_QUAD, BF16)

static quad_function *const quad_functions[2][QUAD] = {{EACH_COUNT(NAME_QUAD, F32)}, {EACH_COUNT(NAME_QUAD, BF16)}};

/* Adds to `whole` the sums of a later segment. Not inlined: every caller gets the same instructions, hence bits. */
__attribute__((noinline)) static void merge(long count, long width, softmax *whole_of, float *whole,
                                            const softmax *part_of, const float *part)
{
    for (long first = 0; first < count; first += QUAD) {
        softmax *w = whole_of + first / QUAD;
        const softmax *p = part_of + first / QUAD;
        const vec most = at_least(w->most, p->most), floor = finite_base(most);
        const vec keep = exp2_vec(w->most - floor), add = exp2_vec(p->most - floor);
        w->most = most;
        w->sum = w->sum * keep + p->sum * add;
        for (long i = first; i < count && i < first + QUAD; i++)
            for (long d = 0; d < width; d += LANES) {
                const long at = i * width + d;
                store(whole + at, load(whole + at) * keep[i % QUAD] + load(part + at) * add[i % QUAD]);
            }
    }
}

static void reset(long quads, long values, softmax *of, float *sums)
{
    for (long i = 0; i < quads; i++)
        of[i] = (softmax){splat(-INFINITY), splat(0.0f)};
    memset(sums, 0, sizeof(float) * (size_t)values);
}

/* Where the tokens of a row from position `base` up to `end` are, BLOCK at most. The last pointers repeat: so all may
 * be read. */
static void find_tokens(const pages *p, long base, long end, token_block *block)
{
    long index = base / p->page_size, at = base % p->page_size;
    block->base = base;
    block->count = end - base < BLOCK ? end - base : BLOCK;
    for (long t = 0; t < block->count; t++) {
        const long offset = (p->table[index] * p->page_size + at) * p->token_bytes;
        block->keys[t] = p->keys + offset;
        block->values[t] = p->values + offset;
        if (++at == p->page_size) {
            at = 0;
            index++;
        }
    }
    for (long t = block->count; t < BLOCK; t++) {
        block->keys[t] = block->keys[block->count - 1];
        block->values[t] = block->values[block->count - 1];
    }
}

/* A block of one head, copied to where rows are as wide as whole chunks. */
static void copy_tokens(const token_block *block, long at, long width, size_t size, long head_dim, attention_room *room,
                        token_block *copy)
{
    *copy = *block;
    for (long t = 0; t < block->count; t++) {
        memcpy(room->keys + (size_t)(t * width) * size, block->keys[t] + at, (size_t)head_dim * size);
        memcpy(room->values + (size_t)(t * width) * size, block->values[t] + at, (size_t)head_dim * size);
    }
    for (long t = 0; t < BLOCK; t++) {
        const long from = t < block->count ? t : block->count - 1;
        copy->keys[t] = room->keys + (size_t)(from * width) * size;
        copy->values[t] = room->values + (size_t)(from * width) * size;
    }
}

/* First position that the queries see of the segments from `from` on. */
ALWAYS long first_position(const query_set *qs, long from)
{
    const long low = lowest(qs, qs->first) / BLOCK * BLOCK;
    return low > from * SEGMENT ? low : from * SEGMENT;
}

/* Attention of KV heads `head` and following over the segments `from` to `to`, as far as the queries see them, into
 * `whole`. `next` is what will be attended to afterwards, or NULL. */
static void attend(const pages *p, const query_set *qs, long head, long from, long to, const token_block *next,
                   attention_room *room)
{
    const long size = (long)dtype_size(p->type), quads = (qs->count + QUAD - 1) / QUAD;
    const long values = qs->heads * qs->count * qs->width;
    const long last = qs->first + (qs->count - 1) / qs->per_token;
    const long end = last + 1 < to * SEGMENT ? last + 1 : to * SEGMENT;
    token_block blocks[2], copy;
    int turn = 0;
    reset(qs->heads * quads, values, room->whole_of, room->whole);
    long base = first_position(qs, from);
    if (base >= end)
        return;
    find_tokens(p, base, end, &blocks[0]);
    reset(qs->heads * quads, values, room->part_of, room->part);
    for (; base < end; base += BLOCK, turn ^= 1) {
        const token_block *block = &blocks[turn], *following = next;
        if (base + BLOCK < end) {
            find_tokens(p, base + BLOCK, end, &blocks[turn ^ 1]);
            following = &blocks[turn ^ 1];
        }
        fetch ahead[2] = {{0}};
        if (following) {
            const long at = head * qs->head_dim * size, bytes = qs->heads * qs->head_dim * size;
            ahead[0] = (fetch){following->keys, following->count, NULL, NULL, at, bytes};
            ahead[1] = (fetch){following->values, following->count, NULL, NULL, at, bytes};
        }
        for (long h = 0; h < qs->heads; h++) {
            long at = (head + h) * qs->head_dim * size;
            if (qs->head_dim != qs->width) {
                copy_tokens(block, at, qs->width, (size_t)size, qs->head_dim, room, &copy);
                block = &copy;
                at = 0;
            }
            for (long i = 0; i < qs->count; i += QUAD) {
                const long count = qs->count - i < QUAD ? qs->count - i : QUAD, query = h * qs->count + i;
                quad_functions[p->type][count - 1](qs, qs->q + query, i, block, at, i ? NULL : ahead,
                                                   room->part_of + h * quads + i / QUAD,
                                                   room->part + query * qs->width);
            }
            block = &blocks[turn];
        }
        for (int i = 0; i < 2; i++) /* a short block has not fetched all of a long one */
            while (ahead[i].left)
                fetch_line(&ahead[i]);
        if ((base + BLOCK) % SEGMENT == 0 || base + BLOCK >= end) {
            for (long h = 0; h < qs->heads; h++)
                merge(qs->count, qs->width, room->whole_of + h * quads, room->whole + h * qs->count * qs->width,
                      room->part_of + h * quads, room->part + h * qs->count * qs->width);
            reset(qs->heads * quads, values, room->part_of, room->part);
        }
    }
}

/* Writes a query's result, divided by its sum and back in the order of head_dim. */
static void attention_put(int type, long head_dim, float sum, const float *in, float *out)
{
    const float share = 1.0f / sum;
    long d = 0;
    for (; type == BF16 && d + CHUNK <= head_dim; d += CHUNK)
        for (int j = 0; j < LANES; j++) {
            out[d + 2 * j] = in[d + j] * share;
            out[d + 2 * j + 1] = in[d + LANES + j] * share;
        }
    for (; d < head_dim; d++)
        out[d] = in[d / CHUNK * CHUNK + place(type, (int)(d % CHUNK))] * share;
}

#endif
