#include "sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int32_t find(const struct sampler *m, int32_t id)
{
    int32_t low = 0, high = m->n_adjust;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (m->adjust[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int grow(struct sampler *m, int32_t cap)
{
    struct row_adjust *adjust = realloc(m->adjust, (size_t)cap * sizeof(*adjust));
    if (!adjust)
        return ERR_NOMEM;
    m->adjust = adjust;
    float *biases = realloc(m->biases, (size_t)cap * sizeof(*biases));
    if (!biases)
        return ERR_NOMEM;
    m->biases = biases;
    int32_t *n_made = realloc(m->n_made, (size_t)cap * sizeof(*n_made));
    if (!n_made)
        return ERR_NOMEM;
    m->n_made = n_made;
    m->cap = cap;
    return 0;
}

/* The place of id, made when there is none; -1: no memory. */
static int32_t place_of(struct sampler *m, int32_t id)
{
    int32_t at = find(m, id);
    if (at < m->n_adjust && m->adjust[at].id == id)
        return at;
    if (m->n_adjust == m->cap && grow(m, m->cap ? 2 * m->cap : 16) != 0)
        return -1;
    size_t n = (size_t)(m->n_adjust - at);
    memmove(m->adjust + at + 1, m->adjust + at, n * sizeof(*m->adjust));
    memmove(m->biases + at + 1, m->biases + at, n * sizeof(*m->biases));
    memmove(m->n_made + at + 1, m->n_made + at, n * sizeof(*m->n_made));
    m->adjust[at] = (struct row_adjust){.id = id, .scale = 1};
    m->biases[at] = 0;
    m->n_made[at] = 0;
    m->n_adjust++;
    return at;
}

static bool repeats_count(const struct sampling *s)
{
    return s->repetition_penalty > 0 && s->repetition_penalty != 1;
}

static bool counts_matter(const struct sampling *s)
{
    return s->presence_penalty != 0 || s->frequency_penalty != 0;
}

static int by_id(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* The prompt's distinct ids, in order, so that none has to be moved for the next. */
static int add_prompt(struct sampler *m, const int32_t *prompt, int32_t n_prompt)
{
    int32_t *ids = malloc((size_t)n_prompt * sizeof(*ids));
    if (!ids)
        return ERR_NOMEM;
    memcpy(ids, prompt, (size_t)n_prompt * sizeof(*ids));
    qsort(ids, (size_t)n_prompt, sizeof(*ids), by_id);
    int rc = 0;
    for (int32_t i = 0; rc == 0 && i < n_prompt; i++) {
        if (i > 0 && ids[i] == ids[i - 1])
            continue;
        int32_t at = place_of(m, ids[i]);
        rc = at < 0 ? ERR_NOMEM : 0;
        if (rc == 0)
            m->adjust[at].scale = m->s->repetition_penalty;
    }
    free(ids);
    return rc;
}

int sampler_init(struct sampler *m, const struct sampling *s, const int32_t *prompt,
                 int32_t n_prompt)
{
    *m = (struct sampler){.s = s};
    int rc = repeats_count(s) ? add_prompt(m, prompt, n_prompt) : 0;
    for (int32_t i = 0; rc == 0 && i < s->n_bias; i++) {
        int32_t at = place_of(m, s->bias[i].id);
        if (at < 0)
            rc = ERR_NOMEM;
        else
            m->adjust[at].add = m->biases[at] = s->bias[i].bias;
    }
    for (int32_t i = 0; rc == 0 && s->min_new > 0 && i < s->n_stop; i++)
        rc = place_of(m, s->stop_ids[i]) < 0 ? ERR_NOMEM : 0;
    if (rc != 0)
        sampler_fini(m);
    return rc;
}

void sampler_fini(struct sampler *m)
{
    free(m->adjust);
    free(m->biases);
    free(m->n_made);
    *m = (struct sampler){0};
}

bool sampler_is_plain(const struct sampler *m)
{
    return m->s->temperature <= 0 && m->n_adjust == 0;
}

/* splitmix64 (Steele, Lea, Flood 2014) of the seed and the token's number, as 24 bits of [0,
 * 1). */
static float draw(uint64_t seed, int32_t n)
{
    uint64_t z = seed + ((uint64_t)(uint32_t)n + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return (float)(z >> 40) * 0x1p-24f;
}

struct row_sample sampler_next(struct sampler *m)
{
    const struct sampling *s = m->s;
    for (int32_t i = 0; i < s->n_stop && s->min_new > 0; i++) {
        int32_t at = find(m, s->stop_ids[i]);
        float made = (float)m->n_made[at];
        m->adjust[at].add = m->n_new < s->min_new
                                ? -INFINITY
                                : m->biases[at] - s->frequency_penalty * made -
                                      (made > 0 ? s->presence_penalty : 0);
    }
    return (struct row_sample){.inv_temperature =
                                   s->temperature > 0 ? 1 / s->temperature : INFINITY,
                               .top_k = s->top_k,
                               .top_p = s->top_p > 0 ? s->top_p : 1,
                               .min_p = s->min_p,
                               .u = draw(s->seed, m->n_new),
                               .n_adjust = m->n_adjust,
                               .adjust = m->adjust};
}

int sampler_add(struct sampler *m, int32_t id)
{
    const struct sampling *s = m->s;
    m->n_new++;
    if (!repeats_count(s) && !counts_matter(s))
        return 0;
    int32_t at = place_of(m, id);
    if (at < 0)
        return ERR_NOMEM;
    m->n_made[at]++;
    if (repeats_count(s))
        m->adjust[at].scale = s->repetition_penalty;
    m->adjust[at].add =
        m->biases[at] - s->presence_penalty - s->frequency_penalty * (float)m->n_made[at];
    return 0;
}

bool sampler_is_stop(const struct sampler *m, int32_t id)
{
    for (int32_t i = 0; i < m->s->n_stop; i++)
        if (m->s->stop_ids[i] == id)
            return true;
    return false;
}
