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

#define BLOCK 64
#define SEGMENT 512
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

/* Softmax so far of four queries: largest score (in powers of two), and sum of 2^(score - largest). Lanes of the same
 * query agree. */
typedef struct {
    vec most, sum;
} softmax;

/* Room for one item, made once per thread. `width` is head_dim rounded up to CHUNK. */
typedef struct {
    float *part;      /* [queries][width] sums of the running segment, divided by nothing yet */
    float *whole;     /* [queries][width] of the segments before it */
    softmax *part_of, *whole_of; /* [queries / QUAD] */
    char *keys, *values;         /* [BLOCK][width] copies, when head_dim is not a multiple of CHUNK */
} attention_room;

/* Queries of one row that share a KV head. */
typedef struct {
    const float *const *q; /* [count] pointers to [width]: scaled, in the order of `load_pair`; up to a multiple of
                            * QUAD they must be valid */
    long count;
    long per_token;     /* queries of one token: consecutive */
    long first;         /* position of the first query's token */
    long window;        /* tokens that a query sees, or 0 for all */
    long head_dim, width;
} queries;

ALWAYS long lowest(const queries *q, long position)
{
    return q->window && position >= q->window ? position - q->window + 1 : 0;
}

/* Scores of `count` queries (a constant) against TOKENS tokens. */
ALWAYS vec scores(int count, int type, const float *const *q, const char *const *k, long width)
{
    const long step = CHUNK * (long)dtype_size(type);
    vec sum[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        sum[i] = splat(0.0f);
    for (long d = 0, at = 0; d < width; d += CHUNK, at += step) {
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

/* One block of up to BLOCK tokens from position `base` on: `tokens` of them exist. k and v point at them, and k at
 * valid memory up to a multiple of TOKENS. `k_ahead` and `v_ahead`, or NULL, are fetched into the cache meanwhile. */
ALWAYS void quad_block(int count, int type, const queries *qs, long first_query, long base, long tokens,
                       const char *const *k, const char *const *v, const char *const *k_ahead,
                       const char *const *v_ahead, softmax *state, float *sums)
{
    const long first = qs->first + first_query / qs->per_token;
    const long last = qs->first + (first_query + count - 1) / qs->per_token;
    const long low = lowest(qs, first) > base ? lowest(qs, first) - base : 0;
    const long high = last - base + 1 < tokens ? last - base + 1 : tokens;
    if (low >= high)
        return;
    const long step = CHUNK * (long)dtype_size(type), line_bytes = qs->head_dim * (long)dtype_size(type);
    const bool masked = base + (high + TOKENS - 1) / TOKENS * TOKENS - 1 > first || base < lowest(qs, last);
    ivec position = {0}, window_low = {0}, offset = {0};
    for (int i = 0; masked && i < LANES; i++) {
        const long query = i % QUAD < count ? first_query + i % QUAD : first_query;
        const long at = qs->first + query / qs->per_token;
        position[i] = (int32_t)(at - base);
        window_low[i] = (int32_t)(lowest(qs, at) - base);
        offset[i] = i / QUAD;
    }

    float weight[BLOCK * QUAD];
    vec most = splat(-INFINITY);
    for (long t = low / TOKENS * TOKENS; t < high; t += TOKENS) {
        if (k_ahead)
            for (int i = 0; i < TOKENS; i++)
                for (long at = 0; at < line_bytes; at += 64)
                    __builtin_prefetch(k_ahead[t + i] + at, 0, 2);
        vec s = scores(count, type, qs->q + first_query, k + t, qs->width);
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

    for (long d = 0, at = 0; d < qs->width; d += CHUNK, at += step) {
        vec out[QUAD][2];
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            out[i][0] = load(sums + i * qs->width + d) * fade[i];
            out[i][1] = load(sums + i * qs->width + d + LANES) * fade[i];
        }
        for (long t = low; t < high; t++) {
            vec lo, hi;
            load_pair(type, v[t] + at, &lo, &hi);
            if (v_ahead && at % 64 == 0)
                __builtin_prefetch(v_ahead[t] + at, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                out[i][0] += weight[t * QUAD + i] * lo;
                out[i][1] += weight[t * QUAD + i] * hi;
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            store(sums + i * qs->width + d, out[i][0]);
            store(sums + i * qs->width + d + LANES, out[i][1]);
        }
    }
}

typedef void quad_function(const queries *qs, long first_query, long base, long tokens, const char *const *k,
                           const char *const *v, const char *const *k_ahead, const char *const *v_ahead,
                           softmax *state, float *sums);

#define QUAD_BLOCK(count, type)                                                                                      \
    static void quad_block_##count##_##type(const queries *qs, long first_query, long base, long tokens,             \
                                            const char *const *k, const char *const *v,                              \
                                            const char *const *k_ahead, const char *const *v_ahead, softmax *state,  \
                                            float *sums)                                                             \
    {                                                                                                                \
        quad_block(count, type, qs, first_query, base, tokens, k, v, k_ahead, v_ahead, state, sums);                 \
    }
QUAD_BLOCK(1, F32)
QUAD_BLOCK(2, F32)
QUAD_BLOCK(3, F32)
QUAD_BLOCK(4, F32)
QUAD_BLOCK(1, BF16)
QUAD_BLOCK(2, BF16)
QUAD_BLOCK(3, BF16)
QUAD_BLOCK(4, BF16)

static quad_function *const quad_functions[2][QUAD] = {
    {quad_block_1_F32, quad_block_2_F32, quad_block_3_F32, quad_block_4_F32},
    {quad_block_1_BF16, quad_block_2_BF16, quad_block_3_BF16, quad_block_4_BF16},
};

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

static void reset(long count, long width, softmax *of, float *sums)
{
    for (long i = 0; i < count; i += QUAD)
        of[i / QUAD] = (softmax){splat(-INFINITY), splat(0.0f)};
    memset(sums, 0, sizeof(float) * (size_t)(count * width));
}

/* Pointers to the keys and values of the tokens base .. base + tokens. */
static void find_tokens(const pages *p, long head_bytes, long base, long tokens, const char **k, const char **v)
{
    long index = base / p->page_size, at = base % p->page_size;
    for (long t = 0; t < tokens; t++) {
        const long offset = (p->table[index] * p->page_size + at) * p->token_bytes + head_bytes;
        k[t] = p->keys + offset;
        v[t] = p->values + offset;
        if (++at == p->page_size) {
            at = 0;
            index++;
        }
    }
}

/* Attention over segments `from` to `to`, as far as the queries see them, into `whole`. */
static void attend(const pages *p, const queries *qs, long kv_head, long from, long to, attention_room *room)
{
    const long size = (long)dtype_size(p->type), head = kv_head * qs->head_dim * size;
    const long last = qs->first + (qs->count - 1) / qs->per_token;
    const char *pointers[2][2][BLOCK + TOKENS];
    const bool copies = qs->head_dim != qs->width;
    reset(qs->count, qs->width, room->whole_of, room->whole);
    if (from < lowest(qs, qs->first) / SEGMENT)
        from = lowest(qs, qs->first) / SEGMENT;
    if (to > last / SEGMENT + 1)
        to = last / SEGMENT + 1;
    for (long segment = from; segment < to; segment++) {
        long base = segment * SEGMENT, end = base + SEGMENT < last + 1 ? base + SEGMENT : last + 1;
        bool found = false;
        int turn = 0;
        reset(qs->count, qs->width, room->part_of, room->part);
        if (base < lowest(qs, qs->first))
            base = lowest(qs, qs->first) / BLOCK * BLOCK;
        for (; base < end; base += BLOCK, turn ^= 1) {
            const long tokens = end - base < BLOCK ? end - base : BLOCK;
            const char **k = pointers[turn][0], **v = pointers[turn][1];
            const char **k_ahead = NULL, **v_ahead = NULL;
            if (!found)
                find_tokens(p, head, base, tokens, k, v);
            found = end - base > BLOCK;
            if (found) {
                const long left = end - base - BLOCK, more = left < BLOCK ? left : BLOCK;
                k_ahead = pointers[turn ^ 1][0];
                v_ahead = pointers[turn ^ 1][1];
                find_tokens(p, head, base + BLOCK, more, k_ahead, v_ahead);
                for (long t = more; t < BLOCK; t++) {
                    k_ahead[t] = k_ahead[more - 1];
                    v_ahead[t] = v_ahead[more - 1];
                }
            }
            if (copies)
                for (long t = 0; t < tokens; t++) {
                    memcpy(room->keys + t * qs->width * size, k[t], (size_t)(qs->head_dim * size));
                    memcpy(room->values + t * qs->width * size, v[t], (size_t)(qs->head_dim * size));
                    k[t] = room->keys + t * qs->width * size;
                    v[t] = room->values + t * qs->width * size;
                }
            for (long t = tokens; t < BLOCK && t % TOKENS; t++)
                k[t] = k[tokens - 1];
            for (long i = 0; i < qs->count; i += QUAD) {
                const long count = qs->count - i < QUAD ? qs->count - i : QUAD;
                quad_functions[p->type][count - 1](qs, i, base, tokens, k, v, i ? NULL : k_ahead, i ? NULL : v_ahead,
                                                   room->part_of + i / QUAD, room->part + i * qs->width);
            }
        }
        merge(qs->count, qs->width, room->whole_of, room->whole, room->part_of, room->part);
    }
}

/* Writes query i's result, divided by its sum and back in the order of head_dim, to out[i]. */
static void attention_put(const queries *qs, int type, const softmax *of, const float *sums, float *const *out)
{
    for (long i = 0; i < qs->count; i++) {
        const float share = 1.0f / of[i / QUAD].sum[i % QUAD];
        const float *in = sums + i * qs->width;
        float *to = out[i];
        long d = 0;
        for (; type == BF16 && d + CHUNK <= qs->head_dim; d += CHUNK)
            for (int j = 0; j < LANES; j++) {
                to[d + 2 * j] = in[d + j] * share;
                to[d + 2 * j + 1] = in[d + LANES + j] * share;
            }
        for (; d < qs->head_dim; d++)
            to[d] = in[d / CHUNK * CHUNK + place(type, (int)(d % CHUNK))] * share;
    }
}

#endif
