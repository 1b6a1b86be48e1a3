/* What is decided before a step runs: whether it is a step at all, and how its attention is dealt out. */

#ifndef APH_PLAN_H
#define APH_PLAN_H

#include "decoder.h"

/* Results of `prepare`. */
enum { OK = 0, NO_MEMORY = 1, BAD_TOKEN = 2, BAD_PAGE = 3, BAD_POSITION = 4 };

/* Lists the attention of a step, of all its tokens or of each row's last one. With `write` unset it only counts. */
static void make_plan(const decoder *d, bool trim, bool write, attention_plan *plan)
{
    const step *s = &d->step;
    const long kv_heads = d->shape.kv_heads, most_tokens = ITEM_QUERIES / d->group;
    long items = 0, merges = 0, parts = 0, segments = 0, first = 0;
    for (long row = 0; row < s->rows; row++)
        segments += (s->starts[row] + s->lengths[row] - 1) / SEGMENT + 1;
    /* Single tokens: with segments enough for all threads, an item takes a few, with all heads, for these lie together
     * in memory; with less, it takes one head of one. */
    const long share = segments / (4 * d->shape.threads), together = least(kv_heads, most_tokens);
    const long each = share < 1 ? 1 : least(share, 4), heads = share < 1 ? 1 : together;
    for (long row = 0; row < s->rows; row++) {
        const long length = s->lengths[row], begin = first;
        first += length;
        if (length > 1 && !trim) {
            /* From the last tokens on, which have most to do: threads then end together. */
            for (long at = (length - 1) / most_tokens * most_tokens; at >= 0; at -= most_tokens)
                for (long head = 0; head < kv_heads; head++, items++)
                    if (write)
                        plan->items[items] = (attention_item){
                            row, begin + at, least(most_tokens, length - at), head, 1, 0, LONG_MAX / SEGMENT, -1};
            continue;
        }
        const long token = begin + length - 1, count = (s->starts[row] + length - 1) / SEGMENT + 1;
        for (long from = 0; from < count; from += each)
            for (long head = 0; head < kv_heads; head += heads, items++)
                if (write)
                    plan->items[items] = (attention_item){row, token, 1, head, least(heads, kv_heads - head), from,
                                                          least(from + each, count), count > each ? parts + from : -1};
        if (count > each) {
            if (write)
                plan->merges[merges] = (merge_item){row, token, parts, count};
            merges++;
            parts += count;
        }
    }
    plan->item_count = items;
    plan->merge_count = merges;
    plan->part_count = parts;
}

/* Checks the step in `d` and gets its buffers ready. */
static int prepare(decoder *d)
{
    const step *s = &d->step;
    scratch *b = &d->scratch;
    long first = 0;
    for (long row = 0; row < s->rows; row++) {
        const long start = s->starts[row], length = s->lengths[row];
        if (start < 0 || length < 1 || start + length > d->shape.positions)
            return BAD_POSITION;
        const long used = (start + length + s->page_size - 1) / s->page_size;
        if (used > s->table_width)
            return BAD_PAGE;
        for (long i = 0; i < used; i++)
            if (s->tables[row * s->table_width + i] < 0 || s->tables[row * s->table_width + i] >= s->pages)
                return BAD_PAGE;
        first += length;
    }
    if (first != s->total)
        return BAD_POSITION;
    for (long i = 0; i < s->total; i++)
        if (s->tokens[i] < 0 || s->tokens[i] >= d->shape.vocab)
            return BAD_TOKEN;

    attention_plan all, trimmed;
    make_plan(d, false, false, &all);
    make_plan(d, true, false, &trimmed);
    const long items = most(all.item_count, trimmed.item_count), merges = most(all.merge_count, trimmed.merge_count);
    const long parts = most(all.part_count, trimmed.part_count);
    if (s->total > b->tokens || s->rows > b->rows || items > b->items || merges > b->merges || parts > b->parts) {
        scratch larger = {
            .tokens = most(b->tokens, round_up(s->total, 16)),
            .rows = most(b->rows, round_up(s->rows, 16)),
            .items = most(b->items, round_up(items, 64)),
            .merges = most(b->merges, round_up(merges, 64)),
            .parts = most(b->parts, round_up(parts, 64)),
        };
        unmap(&b->memory); /* first: the two together would be the most that a step ever takes */
        *b = (scratch){0};
        take_scratch(d, &larger, &larger.memory);
        if (!map(&larger.memory))
            return NO_MEMORY;
        take_scratch(d, &larger, &larger.memory);
        *b = larger;
    }
    make_plan(d, false, true, &b->plan);
    make_plan(d, true, true, &b->trimmed);
    for (long row = 0, token = 0; row < s->rows; row++) {
        for (long i = 0; i < s->lengths[row]; i++, token++) {
            b->row_of[token] = row;
            b->position[token] = s->starts[row] + i;
        }
        b->last[row] = token - 1;
    }
    return OK;
}

#endif
