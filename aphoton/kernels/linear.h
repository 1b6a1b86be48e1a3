/* Packed matrices, and activations multiplied by them.
 *
 * A matrix [N, K] is stored as panels of CHUNK outputs: for each k the panel's CHUNK weights, so that a panel is read
 * in one stream. A tile is a few rows of activations times one panel, summed in registers.
 *
 * Each output is one sum over k = 0, 1, 2, ... in float32, whatever the tile's height, the split of k or the thread:
 * breaking the sum off and taking it up again from memory loses nothing. So a row's result does not depend, in any
 * bit, on the rows beside it. */

#ifndef APH_LINEAR_H
#define APH_LINEAR_H

#include "team.h"
#include "vector.h"

#if LANES == 16 || defined(__aarch64__)
#define TILE_ROWS 12 /* 24 sums and the panel's two vectors, of 32 registers */
#else
#define TILE_ROWS 6 /* 12 sums, the panel's two vectors and a factor, of 16 registers */
#endif
#define BLOCK_ROWS 96    /* rows that go over a panel while it is in the cache */
#define GROUP 8          /* panels that one claim takes at most */
#define NEAR_BYTES 20480 /* of a panel, that stay in the first-level cache */
#define FAR_FLOATS 65536 /* activations that stay in the core's own second-level cache: 256 KB */

typedef struct {
    char *data;
    float *bias; /* [panels * CHUNK], or NULL */
    long n, k;
    long panels; /* a gate matrix and its up matrix lie panel by panel in turns */
} matrix;

/* Memory, from `at` to `end`, to be fetched into the cache. */
typedef struct {
    const char *at, *end;
} span;

typedef enum {
    PUT,    /* out = y (+ bias) */
    ADD,    /* out += y (+ bias) */
    SWIGLU, /* out = silu(y of gate) * (y of up) */
    EXACT,  /* out = y, for rows that have no room beyond column n */
} finish;

typedef struct {
    const matrix *w;
    int type; /* of the weights */
    const float *a;
    long lda;
    float *out;
    long ldo;
    long rows;
    finish how;
    float **tiles; /* per thread: [GROUP][BLOCK_ROWS][CHUNK] */
} linear;

ALWAYS long panel_bytes(const matrix *w, int type) { return w->k * CHUNK * (long)dtype_size(type); }

/* c [height, CHUNK] (+)= a [height, depth] times depth rows of a panel. Fetches `soon` meanwhile, up to `lines` cache
 * lines a step: of the next panel, for the memory would be idle while this one is gone over again. */
ALWAYS void tile(int height, int type, const float *restrict a, long lda, const char *restrict b, long depth,
                 float *restrict c, bool fresh, span soon, int lines)
{
    enum { STEP = 8 };
    const long width = CHUNK * (long)dtype_size(type);
    vec sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < height; i++) {
        sum[i][0] = fresh ? splat(0.0f) : load(c + i * CHUNK);
        sum[i][1] = fresh ? splat(0.0f) : load(c + i * CHUNK + LANES);
    }
    long k = 0;
    for (; k + STEP <= depth; k += STEP) {
        for (int j = 0; j < lines && soon.at < soon.end; j++, soon.at += 64)
            __builtin_prefetch(soon.at, 0, 2);
#pragma GCC unroll 8
        for (int s = 0; s < STEP; s++) {
            vec lo, hi;
            load_pair(type, b + s * width, &lo, &hi);
#pragma GCC unroll 12
            for (int i = 0; i < height; i++) {
                float x = a[i * lda + k + s];
                sum[i][0] += x * lo;
                sum[i][1] += x * hi;
            }
        }
        b += STEP * width;
    }
    for (; k < depth; k++, b += width) {
        vec lo, hi;
        load_pair(type, b, &lo, &hi);
#pragma GCC unroll 12
        for (int i = 0; i < height; i++) {
            float x = a[i * lda + k];
            sum[i][0] += x * lo;
            sum[i][1] += x * hi;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < height; i++) {
        store(c + i * CHUNK, sum[i][0]);
        store(c + i * CHUNK + LANES, sum[i][1]);
    }
}

typedef void tile_function(const float *a, long lda, const char *b, long depth, float *c, bool fresh, span soon,
                           int lines);

#if TILE_ROWS == 6
#define EACH_HEIGHT(of, type) of(1, type) of(2, type) of(3, type) of(4, type) of(5, type) of(6, type)
#else
#define EACH_HEIGHT(of, type)                                                                                          \
    of(1, type) of(2, type) of(3, type) of(4, type) of(5, type) of(6, type)                                            \
    of(7, type) of(8, type) of(9, type) of(10, type) of(11, type) of(12, type)
#endif
#define DEFINE_TILE(height, type)                                                                                      \
    static void tile_##height##_##type(const float *a, long lda, const char *b, long depth, float *c, bool fresh,      \
                                       span soon, int lines)                                                           \
    {                                                                                                                  \
        tile(height, type, a, lda, b, depth, c, fresh, soon, lines);                                                   \
    }
#define NAME_TILE(height, type) tile_##height##_##type,

EACH_HEIGHT(DEFINE_TILE, F32)
EACH_HEIGHT(DEFINE_TILE, BF16)

static tile_function *const tile_functions[2][TILE_ROWS] = {{EACH_HEIGHT(NAME_TILE, F32)},
                                                            {EACH_HEIGHT(NAME_TILE, BF16)}};

/* Into how many parts k is cut: so that what is gone over many times stays in a cache. */
ALWAYS long near_cuts(long depth, long rows, int type)
{
    const long near = NEAR_BYTES / (CHUNK * (long)dtype_size(type));
    return rows <= TILE_ROWS ? 1 : (depth + near - 1) / near;
}

ALWAYS long far_cuts(long k, long rows)
{
    const long far = FAR_FLOATS / rows;
    return (k + far - 1) / far;
}

/* c [rows, CHUNK] (+)= a [rows, depth] times depth rows of a panel, which stay in the first-level cache while the
 * rows go over them. `after` is the piece of a panel that comes next. */
static void multiply_piece(const linear *l, const float *a, long rows, const char *b, long depth, bool fresh,
                           const char *after, float *c)
{
    const long width = CHUNK * (long)dtype_size(l->type);
    const long heights = (rows + TILE_ROWS - 1) / TILE_ROWS, cuts = near_cuts(depth, rows, l->type);
    const int lines = (int)((8 * width / 64 + heights - 1) / heights);
    for (long cut = 0; cut < cuts; cut++) {
        const long from = depth * cut / cuts, to = depth * (cut + 1) / cuts, bytes = (to - from) * width;
        const char *ahead = after + from * width;
        for (long h = 0; h < heights; h++) {
            const long row = rows * h / heights, height = rows * (h + 1) / heights - row;
            const span soon = {ahead + bytes * h / heights / 64 * 64, ahead + bytes * (h + 1) / heights / 64 * 64};
            tile_functions[l->type][height - 1](a + row * l->lda + from, l->lda, b + from * width, to - from,
                                                c + row * CHUNK, fresh && cut == 0, soon, lines);
        }
    }
}

/* A block of rows times `count` panels, into c [count][rows][CHUNK]. `next` is the panel after. When the block is too
 * deep for the cache, all panels go over one part of k before the next. */
static void multiply(const linear *l, const float *a, long rows, const char *panel, long count, const char *next,
                     float *c)
{
    const long bytes = panel_bytes(l->w, l->type), k = l->w->k, width = CHUNK * (long)dtype_size(l->type);
    const long cuts = far_cuts(k, rows);
    for (long cut = 0; cut < cuts; cut++) {
        const long from = k * cut / cuts, to = k * (cut + 1) / cuts;
        for (long p = 0; p < count; p++) {
            const char *b = panel + p * bytes + from * width;
            const char *after = p + 1 < count ? b + bytes : cut + 1 < cuts ? panel + to * width : next;
            multiply_piece(l, a + from, rows, b, to - from, cut == 0, after, c + p * rows * CHUNK);
        }
    }
}

ALWAYS vec silu(vec x) { return x / (exp2_vec(x * -LOG2E) + 1.0f); }

/* Puts the rows of one panel's tile (of a gate panel and an up panel: two) where they belong. */
static void finish_panel(const linear *l, const float *c, long rows, long first_row, long panel)
{
    const long column = panel * CHUNK;
    const float *bias = l->w->bias ? l->w->bias + column : NULL;
    const vec b0 = bias ? load(bias) : splat(0.0f), b1 = bias ? load(bias + LANES) : splat(0.0f);
    for (long i = 0; i < rows; i++, c += CHUNK) {
        float *out = l->out + (first_row + i) * l->ldo + column;
        vec y0 = load(c), y1 = load(c + LANES);
        switch (l->how) {
        case PUT:
            store(out, y0 + b0);
            store(out + LANES, y1 + b1);
            break;
        case ADD:
            store(out, load(out) + (y0 + b0));
            store(out + LANES, load(out + LANES) + (y1 + b1));
            break;
        case SWIGLU:
            store(out, silu(y0) * load(c + rows * CHUNK));
            store(out + LANES, silu(y1) * load(c + rows * CHUNK + LANES));
            break;
        case EXACT: {
            const long width = l->w->n - column;
            memcpy(out, c, sizeof(float) * (size_t)(width < CHUNK ? width : CHUNK));
            break;
        }
        }
    }
}

/* Items are (block of rows, panel or pair of panels); panels go fastest, so that the block stays in the cache. */
static void linear_items(void *context, int thread, phase *p, long begin, long end)
{
    const linear *l = context;
    const long each = l->how == SWIGLU ? 2 : 1, units = l->w->panels / each;
    const long blocks = (l->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const long bytes = panel_bytes(l->w, l->type) * each;
    while (begin < end) {
        const long block = begin / units, unit = begin % units;
        const long row = l->rows * block / blocks, rows = l->rows * (block + 1) / blocks - row;
        long count = units - unit < end - begin ? units - unit : end - begin;
        /* What this thread is likely to claim next; if it does not, another has use for it, or nothing is lost. */
        const long following = count < end - begin ? 0 : atomic_load_explicit(&p->next, memory_order_relaxed) % units;
        float *c = l->tiles[thread];
        const float *a = l->a + row * l->lda;
        const char *panel = l->w->data + unit * bytes;
        const long once = far_cuts(l->w->k, rows) == 1 ? 1 : count; /* units between two finishes */
        for (long u = 0; u < count; u += once) {
            const char *next = u + once < count ? panel + (u + once) * bytes : l->w->data + following * bytes;
            multiply(l, a, rows, panel + u * bytes, once * each, next, c);
            for (long v = 0; v < once; v++)
                finish_panel(l, c + v * each * rows * CHUNK, rows, row, unit + u + v);
        }
        begin += count;
    }
}

static void linear_run(team *t, int thread, phase *p, linear *l)
{
    const long each = l->how == SWIGLU ? 2 : 1, units = l->w->panels / each;
    const long blocks = (l->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    phase_run(t, thread, p, units * blocks, GROUP / each, linear_items, l);
}

/* Packs CHUNK rows of a matrix [n, k] into `out`; those beyond n are zeros. */
static void pack_panel(int type, const void *rows, long n, long k, long panel, char *out)
{
    const long first = panel * CHUNK;
    if (type == BF16) {
        const uint16_t *in = rows;
        uint16_t *to = (uint16_t *)out;
        for (int i = 0; i < CHUNK; i++) {
            const int at = 2 * (i % LANES) + i / LANES; /* where load_pair finds value i */
            for (long j = 0; j < k; j++)
                to[j * CHUNK + at] = first + i < n ? in[(first + i) * k + j] : 0;
        }
    } else {
        const float *in = rows;
        float *to = (float *)out;
        for (int i = 0; i < CHUNK; i++)
            for (long j = 0; j < k; j++)
                to[j * CHUNK + i] = first + i < n ? in[(first + i) * k + j] : 0.0f;
    }
}

/* Row `row` of a packed matrix, as float32. */
static void unpack_row(const matrix *w, int type, long row, float *out)
{
    const char *panel = w->data + row / CHUNK * panel_bytes(w, type);
    const int i = (int)(row % CHUNK);
    if (type == BF16) {
        const uint16_t *in = (const uint16_t *)panel + 2 * (i % LANES) + i / LANES;
        for (long j = 0; j < w->k; j++)
            out[j] = from_bf16(in[j * CHUNK]);
    } else {
        const float *in = (const float *)panel + i;
        for (long j = 0; j < w->k; j++)
            out[j] = in[j * CHUNK];
    }
}

#endif
