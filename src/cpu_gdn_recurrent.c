/* The gated delta rule token by token: the oracle of the chunked form. Plain loops in the order
 * of gdn.md 1.1, step 6; an item of the fan-out is a sequence and a value head. */
#include <math.h>
#include <string.h>

#include "cpu_gdn.h"

static void recurrent_token(const struct op_gdn_delta *a, int32_t t, int32_t h, float *S)
{
    int32_t H = a->d.H, HV = a->d.HV, K = a->d.K, V = a->d.V;
    size_t at_k = ((size_t)t * H + h / (HV / H)) * K, at_v = ((size_t)t * HV + h) * V;
    const float *q = (const float *)a->q + at_k, *k = (const float *)a->k + at_k;
    const float *v = (const float *)a->v + at_v;
    float *o = (float *)a->o + at_v;
    float decay = expf(a->g[(size_t)t * HV + h]), beta = a->beta[(size_t)t * HV + h];
    float delta[GDN_DIM_MAX] = {0};
    for (int32_t i = 0; i < K; i++)
        for (int32_t j = 0; j < V; j++) {
            S[(size_t)i * V + j] *= decay;
            delta[j] += S[(size_t)i * V + j] * k[i];
        }
    for (int32_t j = 0; j < V; j++)
        delta[j] = beta * (v[j] - delta[j]);
    memset(o, 0, (size_t)V * sizeof(float));
    for (int32_t i = 0; i < K; i++)
        for (int32_t j = 0; j < V; j++) {
            S[(size_t)i * V + j] += k[i] * delta[j];
            o[j] += S[(size_t)i * V + j] * q[i];
        }
}

static void recurrent_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct op_gdn_delta *a = arg;
    const struct batch *b = a->b;
    int32_t n = (int32_t)(item / a->d.HV), h = (int32_t)(item % a->d.HV);
    int32_t t = b->cu_seqlens[n], end = b->cu_seqlens[n + 1];
    float *S = cpu_state_at(&a->d, a->pool, b->slots[n], h);
    if (t < end && b->start[n] == 0)
        memset(S, 0, (size_t)a->d.K * a->d.V * sizeof(float));
    for (; t < end; t++) {
        recurrent_token(a, t, h, S);
        if (a->z)
            gdn_gate_rows(a, h, t, 1);
        int32_t i = t - b->cu_seqlens[n];
        int32_t to = cpu_save_slot(b, b->map.seq_first[n] + i / CHUNK_TOKENS);
        if (to >= 0 && (i + 1) % CHUNK_TOKENS == 0)
            memcpy(cpu_state_at(&a->d, a->pool, to, h), S,
                   (size_t)a->d.K * a->d.V * sizeof(float));
    }
}

void cpu_gdn_delta_recurrent(struct backend *b, const struct op_gdn_delta *a)
{
    cpu_pool_run(cpu_impl_pool(b), (int64_t)a->b->n_seqs * a->d.HV, recurrent_item, (void *)a);
}
