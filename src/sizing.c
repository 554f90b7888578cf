#include "sizing.h"

#include <stdio.h>

#include "log.h"

void sizing_log(const char *id, const char *backend, const struct arch *a,
                const struct model_sizes *z)
{
    const double mib = 1 << 20;
    log_info("event=model id=%s type=%s layers=%d gdn=%d attn=%d hidden=%d vocab=%d "
             "max_positions=%d",
             id, a->model_type, a->n_layers, a->n_gdn, a->n_attn, a->M, a->vocab,
             a->max_positions);
    log_info("event=sizing backend=%s weights_mib=%.1f scratch_mib=%.1f slots=%d "
             "slot_mib=%.3f slots_mib=%.1f pages=%d page_tokens=%d page_mib=%.3f "
             "pages_mib=%.1f total_mib=%.1f free_mib=%.1f",
             backend, (double)z->weights_bytes / mib,
             (double)(z->scratch_bytes + z->workspace_bytes) / mib, z->o.state_slots,
             (double)z->slot_bytes / mib, (double)z->slots_bytes / mib, z->n_pages,
             z->o.page_tokens, (double)z->page_bytes / mib, (double)z->pages_bytes / mib,
             (double)z->total_bytes / mib, (double)z->memory_bytes / mib);
    log_info("event=limits max_step_tokens=%d max_seqs=%d max_prompt_tokens=%d",
             z->o.max_step_tokens, z->o.max_seqs, z->o.max_prompt_tokens);
}

void sizing_print(const char *id, const char *backend, const struct arch *a,
                  const struct model_sizes *z)
{
    const double mib = 1 << 20;
    printf("%s: configuration and model are good\n", id);
    printf("  model    %s, %d layers (%d GDN, %d attention), hidden %d, vocabulary %d\n",
           a->model_type, a->n_layers, a->n_gdn, a->n_attn, a->M, a->vocab);
    printf("  backend  %s\n", backend);
    printf("  weights  %10.1f MiB\n", (double)z->weights_bytes / mib);
    printf("  scratch  %10.1f MiB for steps of %d tokens in %d pieces\n",
           (double)(z->scratch_bytes + z->workspace_bytes) / mib, z->o.max_step_tokens,
           z->o.max_seqs);
    printf("  states   %10.1f MiB for %d slots\n", (double)z->slots_bytes / mib,
           z->o.state_slots);
    printf("  KV       %10.1f MiB for %lld tokens in %d pages of %d\n",
           (double)z->pages_bytes / mib, (long long)z->n_pages * z->o.page_tokens, z->n_pages,
           z->o.page_tokens);
    printf("  total    %10.1f MiB of %.1f MiB that are free\n", (double)z->total_bytes / mib,
           (double)z->memory_bytes / mib);
    printf("  prompts  up to %d tokens\n", z->o.max_prompt_tokens);
}
