/* A team of threads that walk through a list of phases together.
 *
 * A phase is a number of items. Threads claim items until none is left, and go on when all have been *done*: not when
 * all threads have come by. So a thread that the system has taken off its core holds nobody up unless it was in the
 * middle of an item, and one that comes late skips what is finished. Between runs the threads sleep. */

#ifndef APH_TEAM_H
#define APH_TEAM_H

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct {
    _Alignas(64) atomic_long next; /* first item that nobody has claimed */
    _Alignas(64) atomic_long done; /* items done */
} phase;

typedef struct team team;
typedef void job(void *context, int thread);

struct team {
    pthread_mutex_t lock;
    pthread_cond_t start; /* a run was opened, or `stop` */
    pthread_cond_t idle;  /* the last helper left a run */
    pthread_t *helpers;
    int threads; /* with the one that calls `team_run` */
    int helping; /* helpers inside a run */
    bool open;   /* helpers may still join the run */
    bool stop;
    unsigned long run;
    job *work;
    void *context;
    phase *phases;
    int phase_count;
};

typedef struct {
    team *team;
    int thread;
} helper_start;

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void *helper_main(void *argument)
{
    helper_start start = *(helper_start *)argument;
    team *t = start.team;
    free(argument);
    unsigned long seen = 0;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (!t->stop && !(t->open && t->run != seen))
            pthread_cond_wait(&t->start, &t->lock);
        if (t->stop)
            break;
        seen = t->run;
        t->helping++;
        pthread_mutex_unlock(&t->lock);
        t->work(t->context, start.thread);
        pthread_mutex_lock(&t->lock);
        if (--t->helping == 0)
            pthread_cond_signal(&t->idle);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* Waits until no helper is in the last run any more: from then on what they read may change. */
static void team_settle(team *t)
{
    pthread_mutex_lock(&t->lock);
    while (t->helping)
        pthread_cond_wait(&t->idle, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

static void team_destroy(team *t)
{
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->start);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i + 1 < t->threads; i++)
        pthread_join(t->helpers[i], NULL);
    pthread_cond_destroy(&t->start);
    pthread_cond_destroy(&t->idle);
    pthread_mutex_destroy(&t->lock);
    free(t->phases);
    free(t->helpers);
    free(t);
}

/* NULL when memory or threads are lacking. */
static team *team_create(int threads, int phase_count)
{
    team *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->start, NULL);
    pthread_cond_init(&t->idle, NULL);
    t->threads = 1;
    t->phase_count = phase_count;
    void *phases = NULL;
    t->helpers = calloc((size_t)threads, sizeof *t->helpers);
    if (!t->helpers || posix_memalign(&phases, 64, sizeof(phase) * (size_t)phase_count)) {
        team_destroy(t);
        return NULL;
    }
    t->phases = phases;
    for (int i = 1; i < threads; i++) {
        helper_start *start = malloc(sizeof *start);
        if (start)
            *start = (helper_start){t, i};
        if (!start || pthread_create(&t->helpers[i - 1], NULL, helper_main, start)) {
            free(start);
            team_destroy(t);
            return NULL;
        }
        t->threads++;
    }
    return t;
}

/* Runs `work` on every thread of the team, this one included. Returns when this one is through, which it is only when
 * all phases are: helpers may still be on their way out, hence `team_settle`, which the caller has called before. */
static void team_run(team *t, job *work, void *context)
{
    for (int i = 0; i < t->phase_count; i++) {
        atomic_store_explicit(&t->phases[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&t->phases[i].done, 0, memory_order_relaxed);
    }
    pthread_mutex_lock(&t->lock);
    t->work = work;
    t->context = context;
    t->run++;
    t->open = true;
    pthread_cond_broadcast(&t->start);
    pthread_mutex_unlock(&t->lock);
    work(context, 0);
    pthread_mutex_lock(&t->lock);
    t->open = false;
    pthread_mutex_unlock(&t->lock);
}

/* Claims up to `most` of a phase's items: many while many are left, then fewer, so that threads end together.
 * Returns their number, the first in `begin`. */
static long phase_claim(phase *p, long total, long most, int threads, long *begin)
{
    long at = atomic_load_explicit(&p->next, memory_order_relaxed);
    for (;;) {
        if (at >= total)
            return 0;
        long count = (total - at) / (2 * threads);
        count = count > most ? most : count < 1 ? 1 : count;
        if (atomic_compare_exchange_weak_explicit(&p->next, &at, at + count, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            *begin = at;
            return count;
        }
    }
}

static void phase_finish(phase *p, long count) { atomic_fetch_add_explicit(&p->done, count, memory_order_release); }

/* Short waits are spun through; then the core is offered to others, for this machine is shared with the event loop. */
static void phase_wait(phase *p, long total)
{
    for (int i = 0; atomic_load_explicit(&p->done, memory_order_acquire) < total; i++)
        if (i < 400)
            relax();
        else
            sched_yield();
}

typedef void items_function(void *context, int thread, phase *p, long begin, long end);

/* The part of one thread in a phase. */
static void phase_run(team *t, int thread, phase *p, long total, long most, items_function *work, void *context)
{
    long begin, count;
    while ((count = phase_claim(p, total, most, t->threads, &begin))) {
        work(context, thread, p, begin, begin + count);
        phase_finish(p, count);
    }
    phase_wait(p, total);
}

#endif
