/* A decoder and what it keeps in memory: packed weights, each thread's room, and the buffers of a step. */

#ifndef APH_DECODER_H
#define APH_DECODER_H

#include <sys/mman.h>

#include "attention.h"
#include "linear.h"

#define HUGE_PAGE ((size_t)1 << 21)

typedef struct {
    int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, positions;
    int64_t type; /* of weights and KV cache: a `dtype` */
    int64_t threads;
    int64_t qkv_bias, o_bias, qk_norm; /* whether there are any */
    double eps;
    const float *cos, *sin; /* [positions, head_dim / 2], the caller's for as long as the decoder lives */
    const void *embed;      /* [vocab, hidden] likewise; NULL: the head's rows */
} shape;

/* Weights of a layer: vectors float32, matrices [out, in] of the decoder's type. NULL where there is none. */
typedef struct {
    int64_t window; /* tokens that a token sees, itself included; 0 for all */
    const float *input_norm, *post_norm, *q_norm, *k_norm, *qkv_bias, *o_bias;
    const void *qkv, *o, *gate_up, *down;
} layer_weights;

typedef struct {
    long window;
    float *input_norm, *post_norm, *q_norm, *k_norm;
    matrix qkv, o, gate_up, down;
} layer;

/* What one forward is given. */
typedef struct {
    const int64_t *tokens;                    /* [total] */
    const int32_t *starts, *lengths, *tables; /* [rows], [rows], [rows, table_width] */
    char *kv;                                 /* [layers, 2, pages, page_size, kv_heads, head_dim] */
    float *logits;                            /* [rows, vocab] */
    int64_t rows, total, table_width, pages, page_size;
} step;

/* Consecutive tokens of a row, for some KV heads. */
typedef struct {
    long row, token, tokens; /* the first token's place in the step, and how many */
    long head, heads;
    long from, to; /* segments of their past */
    long part; /* where in `part_sums` the first segment's result goes, the others' following; -1: merged at once */
} attention_item;

typedef struct {
    long row, token, part, parts;
} merge_item;

typedef struct {
    attention_item *items;
    merge_item *merges;
    long item_count, merge_count, part_count;
} attention_plan;

/* Memory that is handed out from its beginning; from base NULL it is only measured. */
typedef struct {
    char *base;
    size_t used, size; /* handed out, and mapped */
} region;

/* Buffers of a step. They grow to the largest step seen, and are kept. */
typedef struct {
    region memory;
    long tokens, rows, items, merges, parts; /* for how many there is room */
    float *x;                   /* [tokens][x_width] residual stream; 0 beyond `hidden` */
    float *last_x;              /* [rows][x_width] the same of each row's last token, at the end of the last layer */
    float *h;                   /* [tokens][x_width] normed */
    float *qkv;                 /* [tokens][qkv_width] */
    float *q;                   /* [tokens][heads][head_width] rotated, scaled, in the order of `load_pair` */
    float *attended;            /* [tokens][o_width] */
    float *act;                 /* [tokens][act_width] */
    float *part_sums;           /* [parts][heads][head_width] */
    softmax *part_of;           /* [parts][kv_heads][group_quads] */
    long *row_of, *position;    /* [tokens] */
    long *last;                 /* [rows] place of each row's last token */
    attention_plan plan, trimmed; /* of all tokens, and of each row's last one only */
} scratch;

typedef struct {
    shape shape;
    team *team;
    layer *layers;
    float *final_norm;
    matrix head;
    region memory; /* of all weights */
    region room;   /* of all threads' tiles and attention rooms */
    long x_width, qkv_width, o_width, act_width, head_width, group, group_quads;
    float **tiles;
    attention_room *rooms;
    step step;
    scratch scratch;
} decoder;

static long round_up(long value, long unit) { return (value + unit - 1) / unit * unit; }
static long least(long a, long b) { return a < b ? a : b; }
static long most(long a, long b) { return a > b ? a : b; }

/* Floats from one row to the next: room for whole panels of any CHUNK, and an odd number of cache lines, or rows would
 * meet in the same few places of the cache. */
static long row_width(long values) { return (round_up(values, 32) / 16 | 1) * 16; }

/* Gives a region that has been measured its memory, zeros, and begins to hand it out; false when there is none.
 *
 * Of the system's own, for what is given back to the C library may stay with the process, and the next decoder's would
 * come on top of it. A large one asks for huge pages: with small ones each step would look up every page of the weights
 * anew. */
static bool map(region *r)
{
    const size_t unit = r->used < HUGE_PAGE ? 1 : HUGE_PAGE, size = (r->used + unit - 1) / unit * unit;
    char *memory = mmap(NULL, size + unit - 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    r->base = memory;
    if (unit > 1) {
        const size_t before = -(uintptr_t)memory % unit; /* whole pages, as all that is cut off here */
        r->base += before;
        if (before)
            munmap(memory, before);
        munmap(r->base + size, unit - before);
#if defined(__linux__)
        madvise(r->base, size, MADV_HUGEPAGE);
#endif
    }
    r->used = 0;
    r->size = size;
    return true;
}

/* Takes back what `map` gave, if it gave any. */
static void unmap(region *r)
{
    if (r->base)
        munmap(r->base, r->size);
    *r = (region){0};
}

/* In whole cache lines. */
static void *take(region *r, long count, size_t size)
{
    char *at = r->base ? r->base + r->used : NULL;
    r->used += ((size_t)count * size + 63) / 64 * 64;
    return at;
}

static matrix take_matrix(region *r, long n, long k, int type, bool pair, bool bias)
{
    matrix w = {.n = n, .k = k, .panels = round_up(n, CHUNK) / CHUNK * (pair ? 2 : 1)};
    w.data = take(r, w.panels * CHUNK * k, dtype_size(type));
    w.bias = bias ? take(r, w.panels * CHUNK, sizeof(float)) : NULL;
    return w;
}

static void take_weights(decoder *d, region *r)
{
    const shape *s = &d->shape;
    const long queries = s->heads * s->head_dim, hidden = s->hidden;
    const int type = (int)s->type;
    for (long i = 0; i < s->layers; i++) {
        layer *l = d->layers + i;
        l->input_norm = take(r, d->x_width, sizeof(float));
        l->post_norm = take(r, d->x_width, sizeof(float));
        l->q_norm = s->qk_norm ? take(r, s->head_dim, sizeof(float)) : NULL;
        l->k_norm = s->qk_norm ? take(r, s->head_dim, sizeof(float)) : NULL;
        l->qkv = take_matrix(r, queries + 2 * s->kv_heads * s->head_dim, hidden, type, false, s->qkv_bias);
        l->o = take_matrix(r, hidden, queries, type, false, s->o_bias);
        l->gate_up = take_matrix(r, s->intermediate, hidden, type, true, false);
        l->down = take_matrix(r, hidden, s->intermediate, type, false, false);
    }
    d->final_norm = take(r, d->x_width, sizeof(float));
    d->head = take_matrix(r, s->vocab, hidden, type, false, false);
}

static void take_rooms(decoder *d, region *r)
{
    const long copies = BLOCK * d->head_width;
    for (long i = 0; i < d->shape.threads; i++) {
        attention_room *room = d->rooms + i;
        d->tiles[i] = take(r, GROUP * BLOCK_ROWS * CHUNK, sizeof(float));
        room->part = take(r, ITEM_QUERIES * d->head_width, sizeof(float));
        room->whole = take(r, ITEM_QUERIES * d->head_width, sizeof(float));
        room->part_of = take(r, ITEM_QUERIES, sizeof(softmax));
        room->whole_of = take(r, ITEM_QUERIES, sizeof(softmax));
        room->keys = take(r, copies, dtype_size((int)d->shape.type));
        room->values = take(r, copies, dtype_size((int)d->shape.type));
    }
}

static void take_scratch(const decoder *d, scratch *s, region *r)
{
    const size_t f = sizeof(float);
    s->x = take(r, s->tokens * d->x_width, f);
    s->last_x = take(r, s->rows * d->x_width, f);
    s->h = take(r, s->tokens * d->x_width, f);
    s->qkv = take(r, s->tokens * d->qkv_width, f);
    s->q = take(r, s->tokens * d->shape.heads * d->head_width, f);
    s->attended = take(r, s->tokens * d->o_width, f);
    s->act = take(r, s->tokens * d->act_width, f);
    s->part_sums = take(r, s->parts * d->shape.heads * d->head_width, f);
    s->part_of = take(r, s->parts * d->shape.kv_heads * d->group_quads, sizeof(softmax));
    s->row_of = take(r, s->tokens, sizeof(long));
    s->position = take(r, s->tokens, sizeof(long));
    s->last = take(r, s->rows, sizeof(long));
    s->plan.items = take(r, s->items, sizeof(attention_item));
    s->trimmed.items = take(r, s->items, sizeof(attention_item));
    s->plan.merges = take(r, s->merges, sizeof(merge_item));
    s->trimmed.merges = take(r, s->merges, sizeof(merge_item));
}

#endif
