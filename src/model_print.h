/* A model's fingerprint: what tells whose states a file holds. Main thread, at start.
 *
 * The checksum (state_sum.h) of the numbers of config.json that the computation depends on, and
 * of every tensor of the checkpoint in order of names: its name, dtype, shape and 64 bytes at
 * up to four places of it, its first among them. All bytes would take as long as loading; a
 * model that was trained on differs nearly everywhere. Neither the backend nor how the
 * checkpoint is cut into files counts. With dummy weights, the seed and the backend that made
 * them stand for tensors. */
#ifndef PREFILLD_MODEL_PRINT_H
#define PREFILLD_MODEL_PRINT_H

#include "arch.h"
#include "safetensors.h"

/* set NULL: dummy weights, of seed and backend. */
uint64_t model_print(const struct arch *a, const struct st_set *set, uint64_t seed,
                     const char *backend);

#endif
