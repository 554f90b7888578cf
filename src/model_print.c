#include "model_print.h"

#include <string.h>

#include "state_sum.h"

enum { PLACE_BYTES = 64, MAX_PLACES = 4, ALL_PLACES = 1 << 14 };

static void add_text(struct state_sum *s, const char *text)
{
    state_sum_add(s, text, strlen(text) + 1);
}

static void add_arch(struct state_sum *s, const struct arch *a)
{
    const int32_t numbers[] = {a->family, a->n_layers, a->M,        a->vocab,      a->H,
                               a->HV,     a->K,        a->V,        a->HQ,         a->HK,
                               a->D,      a->rot_dim,  a->conv_dim, a->F,          a->E,
                               a->top_k,  a->moe_F,    a->shared_F, a->renorm_topk};
    const float floats[] = {a->eps, a->rope_theta};
    state_sum_add(s, numbers, sizeof(numbers));
    state_sum_add(s, floats, sizeof(floats));
    for (int32_t l = 0; l < a->n_layers; l++) {
        int32_t kind[] = {a->layers[l], a->moe[l]};
        state_sum_add(s, kind, sizeof(kind));
    }
}

static void add_tensor(struct state_sum *s, const struct st_tensor *t, size_t n_places)
{
    add_text(s, t->name);
    add_text(s, st_dtype_name(t->dtype));
    state_sum_add(s, t->dims, (size_t)t->n_dims * sizeof(t->dims[0]));
    for (size_t i = 0; i < n_places; i++) {
        size_t at = t->bytes / n_places * i;
        size_t n = t->bytes - at < PLACE_BYTES ? t->bytes - at : PLACE_BYTES;
        state_sum_add(s, (const char *)t->data + at, n);
    }
}

uint64_t model_print(const struct arch *a, const struct st_set *set, uint64_t seed,
                     const char *backend)
{
    struct state_sum s;
    state_sum_start(&s);
    add_arch(&s, a);
    if (!set) {
        add_text(&s, backend);
        state_sum_add(&s, &seed, sizeof(seed));
        return state_sum_of(&s);
    }
    size_t n = st_count(set), n_places = n ? ALL_PLACES / n : 0;
    n_places = n_places < 1 ? 1 : n_places > MAX_PLACES ? MAX_PLACES : n_places;
    for (size_t i = 0; i < n; i++)
        add_tensor(&s, st_at(set, i), n_places);
    return state_sum_of(&s);
}
