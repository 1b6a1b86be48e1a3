/* A decoder's whole forward in one call: embedding, layers over a paged KV cache, logits of each row's last token.
 *
 * Weights and KV cache are float32 or bfloat16, everything else float32. Called from Python through ctypes: `shape`,
 * `layer_weights` and `step` have their twins in `native.py`. One call at a time on one decoder, from any thread. */

#if defined(__linux__)
#define _GNU_SOURCE /* madvise, MAP_ANON */
#endif

#include "plan.h"

#define EXPORT __attribute__((visibility("default")))
#define MOST_HEAD_DIM 512

enum { LAYER_PHASES = 9, OTHER_PHASES = 3, PACKING_PHASES = 4 };

/* ---- Phases ---- */

/* What a thread carries from phase to phase. */
typedef struct {
    decoder *d;
    int layer;
    bool trim;                 /* the last layer: only each row's last token goes on after attention */
    const float *in, *weight; /* of `norm_items` */
} work;

static void embed_items(void *context, int thread, phase *p, long begin, long end)
{
    const work *w = context;
    const shape *s = &w->d->shape;
    (void)thread;
    (void)p;
    for (long i = begin; i < end; i++) {
        const int64_t token = w->d->step.tokens[i];
        float *x = w->d->scratch.x + i * w->d->x_width;
        if (!s->embed) {
            unpack_row(&w->d->head, (int)s->type, token, x);
        } else if (s->type == BF16) {
            const uint16_t *row = (const uint16_t *)s->embed + token * s->hidden;
            for (long j = 0; j < s->hidden; j++)
                x[j] = from_bf16(row[j]);
        } else {
            memcpy(x, (const float *)s->embed + token * s->hidden, sizeof(float) * (size_t)s->hidden);
        }
    }
}

/* out = x / sqrt(mean(x^2) + eps) * weight */
ALWAYS void rms_norm(const float *x, const float *weight, long n, float eps, float *out)
{
    vec squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    float rest = 0.0f;
    long i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++)
            squares[j] += load(x + i + j * LANES) * load(x + i + j * LANES);
    for (; i + LANES <= n; i += LANES)
        squares[0] += load(x + i) * load(x + i);
    for (; i < n; i++)
        rest += x[i] * x[i];
    const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
    const float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES)
        store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

static void norm_items(void *context, int thread, phase *p, long begin, long end)
{
    const work *w = context;
    const decoder *d = w->d;
    (void)thread;
    (void)p;
    for (long i = begin; i < end; i++)
        rms_norm(w->in + i * d->x_width, w->weight, d->shape.hidden, (float)d->shape.eps,
                 d->scratch.h + i * d->x_width);
}

/* Rotates a head: component i against component i + n / 2. */
ALWAYS void rotate(const float *x, const float *cos, const float *sin, long n, float *out)
{
    const long half = n / 2;
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

/* A query of n values in the order of `load_pair`, scaled; 0 up to whole chunks. */
static void put_query(int type, const float *x, long n, float scale, float *out)
{
    for (long d = 0; d < n; d += CHUNK)
        if (d + CHUNK > n)
            for (int i = 0; i < CHUNK; i++)
                out[d + place(type, i)] = d + i < n ? x[d + i] * scale : 0.0f;
        else if (type == BF16)
            for (int i = 0; i < LANES; i++) {
                out[d + i] = x[d + 2 * i] * scale;
                out[d + LANES + i] = x[d + 2 * i + 1] * scale;
            }
        else
            for (int i = 0; i < CHUNK; i++)
                out[d + i] = x[d + i] * scale;
}

static void put_kv(int type, const float *x, long n, char *out)
{
    if (type == BF16)
        for (long i = 0; i < n; i++)
            ((uint16_t *)out)[i] = to_bf16(x[i]);
    else
        memcpy(out, x, sizeof(float) * (size_t)n);
}

/* Bytes from one token's keys to the next one's. */
static long token_bytes(const decoder *d)
{
    return d->shape.kv_heads * d->shape.head_dim * (long)dtype_size((int)d->shape.type);
}

static pages layer_pages(const decoder *d, int index, long row)
{
    const step *s = &d->step;
    const long each = token_bytes(d), bytes = s->pages * s->page_size * each;
    char *keys = s->kv + index * 2 * bytes;
    return (pages){(int)d->shape.type, keys, keys + bytes, s->page_size, each, s->tables + row * s->table_width};
}

/* From projections to rotated queries, and to keys and values in their pages. */
static void rotate_items(void *context, int thread, phase *p, long begin, long end)
{
    const work *w = context;
    const decoder *d = w->d;
    const shape *s = &d->shape;
    const layer *l = d->layers + w->layer;
    const scratch *b = &d->scratch;
    const long n = s->head_dim;
    const int type = (int)s->type;
    const float scale = LOG2E / sqrtf((float)n);
    float normed[MOST_HEAD_DIM], turned[MOST_HEAD_DIM];
    (void)thread;
    (void)p;
    for (long token = begin; token < end; token++) {
        const long row = b->row_of[token], position = b->position[token];
        const float *cos = s->cos + position * (n / 2), *sin = s->sin + position * (n / 2);
        const float *in = b->qkv + token * d->qkv_width;
        float *q = b->q + token * s->heads * d->head_width;
        if (w->trim && token == b->last[row])
            memcpy(b->last_x + row * d->x_width, b->x + token * d->x_width, sizeof(float) * (size_t)d->x_width);
        for (long head = 0; head < s->heads; head++, in += n, q += d->head_width) {
            if (l->q_norm)
                rms_norm(in, l->q_norm, n, (float)s->eps, normed);
            rotate(l->q_norm ? normed : in, cos, sin, n, turned);
            put_query(type, turned, n, scale, q);
        }
        const pages at = layer_pages(d, w->layer, row);
        const long offset =
            (at.table[position / at.page_size] * at.page_size + position % at.page_size) * at.token_bytes;
        char *key = (char *)at.keys + offset, *value = (char *)at.values + offset;
        for (long head = 0; head < s->kv_heads; head++, in += n) {
            if (l->k_norm)
                rms_norm(in, l->k_norm, n, (float)s->eps, normed);
            rotate(l->k_norm ? normed : in, cos, sin, n, turned);
            put_kv(type, turned, n, key + head * n * (long)dtype_size(type));
        }
        put_kv(type, in, s->kv_heads * n, value);
    }
}

static void put_attended(const work *w, long row, long token, long query_head, const softmax *of, long lane,
                         const float *sums)
{
    const decoder *d = w->d;
    const long n = d->shape.head_dim;
    attention_put((int)d->shape.type, n, of->sum[lane], sums,
                  d->scratch.attended + (w->trim ? row : token) * d->o_width + query_head * n);
}

static query_set item_queries(const work *w, const attention_item *it, const float *const *q)
{
    const decoder *d = w->d;
    return (query_set){q, it->heads, it->tokens * d->group, d->group, d->scratch.position[it->token],
                     d->layers[w->layer].window, d->shape.head_dim, d->head_width};
}

/* The tokens that an item will look at first of the segments from `from` on. */
static void find_first(const work *w, const attention_item *it, long from, token_block *block)
{
    const query_set qs = item_queries(w, it, NULL);
    const pages at = layer_pages(w->d, w->layer, it->row);
    const long base = first_position(&qs, from), end = qs.first + 1;
    find_tokens(&at, base < end ? base : qs.first, end, block);
}

/* An item's attention, merged or segment by segment. `next` is what comes after, or NULL. */
static void attend_item(const work *w, const attention_item *it, const attention_item *next, attention_room room)
{
    const decoder *d = w->d;
    const scratch *b = &d->scratch;
    const long group = d->group, width = d->head_width;
    const pages at = layer_pages(d, w->layer, it->row);
    const float *q[ITEM_QUERIES];
    long i = 0;
    for (long head = it->head; head < it->head + it->heads; head++)
        for (long t = 0; t < it->tokens; t++)
            for (long g = 0; g < group; g++)
                q[i++] = b->q + ((it->token + t) * d->shape.heads + head * group + g) * width;
    const query_set qs = item_queries(w, it, q);
    token_block ahead;
    if (next)
        find_first(w, next, next->from, &ahead);
    if (it->part < 0) {
        attend(&at, &qs, it->head, it->from, it->to, next ? &ahead : NULL, &room);
        const long quads = (qs.count + QUAD - 1) / QUAD;
        for (long h = 0; h < it->heads; h++)
            for (i = 0; i < qs.count; i++)
                put_attended(w, it->row, it->token + i / group, (it->head + h) * group + i % group,
                             room.whole_of + h * quads + i / QUAD, i % QUAD, room.whole + (h * qs.count + i) * width);
        return;
    }
    for (long segment = it->from; segment < it->to; segment++) {
        const long part = it->part + segment - it->from;
        token_block following;
        const bool more = segment + 1 < it->to;
        if (more)
            find_first(w, it, segment + 1, &following);
        room.whole = b->part_sums + (part * d->shape.heads + it->head * group) * width;
        room.whole_of = b->part_of + (part * d->shape.kv_heads + it->head) * d->group_quads;
        attend(&at, &qs, it->head, segment, segment + 1, more ? &following : next ? &ahead : NULL, &room);
    }
}

static void attention_items(void *context, int thread, phase *p, long begin, long end)
{
    const work *w = context;
    const attention_plan *plan = w->trim ? &w->d->scratch.trimmed : &w->d->scratch.plan;
    for (; begin < end; begin++) {
        /* Of the last one, the next is what this thread is likely to claim. */
        const long next = begin + 1 < end ? begin + 1 : atomic_load_explicit(&p->next, memory_order_relaxed);
        attend_item(w, plan->items + begin, next < plan->item_count ? plan->items + next : NULL, w->d->rooms[thread]);
    }
}

static void merge_items(void *context, int thread, phase *p, long begin, long end)
{
    const work *w = context;
    const decoder *d = w->d;
    const scratch *b = &d->scratch;
    const attention_room *room = d->rooms + thread;
    const long group = d->group, width = d->head_width;
    (void)p;
    for (const merge_item *m = (w->trim ? b->trimmed : b->plan).merges + begin; begin < end; begin++, m++)
        for (long head = 0; head < d->shape.kv_heads; head++) {
            reset(d->group_quads, group * width, room->whole_of, room->whole);
            for (long part = m->part; part < m->part + m->parts; part++)
                merge(group, width, room->whole_of, room->whole,
                      b->part_of + (part * d->shape.kv_heads + head) * d->group_quads,
                      b->part_sums + (part * d->shape.heads + head * group) * width);
            for (long g = 0; g < group; g++)
                put_attended(w, m->row, m->token, head * group + g, room->whole_of + g / QUAD, g % QUAD,
                             room->whole + g * width);
        }
}

static void project(decoder *d, int thread, phase *p, const matrix *m, const float *a, long lda, float *out, long ldo,
                    long rows, finish how)
{
    linear l = {m, (int)d->shape.type, a, lda, out, ldo, rows, how, d->tiles};
    linear_run(d->team, thread, p, &l);
}

static void forward(void *context, int thread)
{
    decoder *d = context;
    const scratch *b = &d->scratch;
    const long total = d->step.total, rows = d->step.rows;
    team *t = d->team;
    phase *p = t->phases;
    work w = {.d = d};
    float *x = b->x;
    long count = total;
    phase_run(t, thread, p++, total, 16, embed_items, &w);
    for (w.layer = 0; w.layer < d->shape.layers; w.layer++) {
        const layer *l = d->layers + w.layer;
        w.trim = w.layer + 1 == d->shape.layers && rows < total;
        const attention_plan *plan = w.trim ? &b->trimmed : &b->plan;
        w.in = x;
        w.weight = l->input_norm;
        phase_run(t, thread, p++, total, 16, norm_items, &w);
        project(d, thread, p++, &l->qkv, b->h, d->x_width, b->qkv, d->qkv_width, total, PUT);
        phase_run(t, thread, p++, total, 16, rotate_items, &w);
        phase_run(t, thread, p++, plan->item_count, 4, attention_items, &w);
        phase_run(t, thread, p++, plan->merge_count, 1, merge_items, &w);
        if (w.trim) {
            x = b->last_x;
            count = rows;
        }
        project(d, thread, p++, &l->o, b->attended, d->o_width, x, d->x_width, count, ADD);
        w.in = x;
        w.weight = l->post_norm;
        phase_run(t, thread, p++, count, 16, norm_items, &w);
        project(d, thread, p++, &l->gate_up, b->h, d->x_width, b->act, d->act_width, count, SWIGLU);
        project(d, thread, p++, &l->down, b->act, d->act_width, x, d->x_width, count, ADD);
    }
    w.in = x;
    w.weight = d->final_norm;
    phase_run(t, thread, p++, rows, 16, norm_items, &w);
    project(d, thread, p++, &d->head, b->h, d->x_width, d->step.logits, d->shape.vocab, rows, EXACT);
}

/* ---- Packing ---- */

typedef struct {
    decoder *d;
    int count;
    struct {
        const matrix *w;
        const void *rows;
        bool pair; /* rows are those of the gate, then those of the up matrix */
    } matrices[PACKING_PHASES];
    int current;
} packing;

static void pack_items(void *context, int thread, phase *p, long begin, long end)
{
    const packing *pack = context;
    const matrix *w = pack->matrices[pack->current].w;
    const int type = (int)pack->d->shape.type;
    const char *rows = pack->matrices[pack->current].rows;
    (void)thread;
    (void)p;
    for (long panel = begin; panel < end; panel++) {
        char *out = w->data + panel * panel_bytes(w, type);
        if (pack->matrices[pack->current].pair)
            pack_panel(type, rows + panel % 2 * w->n * w->k * (long)dtype_size(type), w->n, w->k, panel / 2, out);
        else
            pack_panel(type, rows, w->n, w->k, panel, out);
    }
}

static void pack_matrices(void *context, int thread)
{
    packing mine = *(packing *)context;
    team *t = mine.d->team;
    for (mine.current = 0; mine.current < mine.count; mine.current++)
        phase_run(t, thread, t->phases + mine.current, mine.matrices[mine.current].w->panels, 16, pack_items, &mine);
}

static void pack_vector(const float *in, long n, long width, float *out)
{
    memcpy(out, in, sizeof(float) * (size_t)n);
    memset(out + n, 0, sizeof(float) * (size_t)(width - n));
}

/* ---- What Python calls ---- */

EXPORT void aphoton_destroy(decoder *d)
{
    if (d->team)
        team_destroy(d->team);
    unmap(&d->scratch.memory);
    unmap(&d->memory);
    unmap(&d->room);
    free(d->layers);
    free(d->tiles);
    free(d->rooms);
    free(d);
}

/* A decoder whose weights are still to be given; NULL when memory or threads are lacking. */
EXPORT decoder *aphoton_create(const shape *s)
{
    decoder *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->shape = *s;
    d->x_width = row_width(s->hidden);
    d->qkv_width = row_width((s->heads + 2 * s->kv_heads) * s->head_dim);
    d->o_width = row_width(s->heads * s->head_dim);
    d->act_width = row_width(s->intermediate);
    d->head_width = round_up(s->head_dim, CHUNK);
    d->group = s->heads / s->kv_heads;
    d->group_quads = (d->group + QUAD - 1) / QUAD;
    d->layers = calloc((size_t)s->layers, sizeof *d->layers);
    d->tiles = calloc((size_t)s->threads, sizeof *d->tiles);
    d->rooms = calloc((size_t)s->threads, sizeof *d->rooms);
    d->team = team_create((int)s->threads, (int)(s->layers * LAYER_PHASES + OTHER_PHASES + PACKING_PHASES));
    if (d->layers && d->tiles && d->rooms && d->team) {
        take_weights(d, &d->memory);
        take_rooms(d, &d->room);
        if (map(&d->memory) && map(&d->room)) {
            take_weights(d, &d->memory);
            take_rooms(d, &d->room);
            return d;
        }
    }
    aphoton_destroy(d);
    return NULL;
}

/* Takes a layer's weights over: they may be freed afterwards. */
EXPORT void aphoton_set_layer(decoder *d, int64_t index, const layer_weights *from)
{
    const shape *s = &d->shape;
    layer *l = d->layers + index;
    l->window = from->window;
    pack_vector(from->input_norm, s->hidden, d->x_width, l->input_norm);
    pack_vector(from->post_norm, s->hidden, d->x_width, l->post_norm);
    if (s->qk_norm) {
        pack_vector(from->q_norm, s->head_dim, s->head_dim, l->q_norm);
        pack_vector(from->k_norm, s->head_dim, s->head_dim, l->k_norm);
    }
    if (s->qkv_bias)
        pack_vector(from->qkv_bias, l->qkv.n, l->qkv.panels * CHUNK, l->qkv.bias);
    if (s->o_bias)
        pack_vector(from->o_bias, l->o.n, l->o.panels * CHUNK, l->o.bias);
    packing pack = {.d = d,
                    .count = 4,
                    .matrices = {{&l->qkv, from->qkv, false},
                                 {&l->o, from->o, false},
                                 {&l->gate_up, from->gate_up, true},
                                 {&l->down, from->down, false}}};
    team_settle(d->team);
    team_run(d->team, pack_matrices, &pack);
    team_settle(d->team); /* `pack` is on this stack */
}

/* The same with the final norm [hidden]. */
EXPORT void aphoton_set_final_norm(decoder *d, const float *final_norm)
{
    pack_vector(final_norm, d->shape.hidden, d->x_width, d->final_norm);
}

/* The same with the head [vocab, hidden]. */
EXPORT void aphoton_set_head(decoder *d, const void *head)
{
    packing pack = {.d = d, .count = 1, .matrices = {{&d->head, head, false}}};
    team_settle(d->team);
    team_run(d->team, pack_matrices, &pack);
    team_settle(d->team);
}

/* Runs a step. Returns OK, or what is wrong with it: then nothing has been written. */
EXPORT int aphoton_forward(decoder *d, const step *s)
{
    team_settle(d->team);
    d->step = *s;
    const int problem = prepare(d);
    if (problem != OK)
        return problem;
    team_run(d->team, forward, d);
    return OK;
}
