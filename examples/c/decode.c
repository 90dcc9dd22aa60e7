/* SPDX-License-Identifier: Apache-2.0 */
/* This program appends the tokens of one request to a paged cache, decodes one token of 16 heads, and computes the same
 * in double. Every call of libmla returns a code; mla_last_error() says in a sentence what was wrong. */
#include <math.h>
#include <mla/c_api.h>
#include <stdio.h>
#include <stdlib.h>

/* DeepSeek-V2-Lite: 16 heads, latent rows of 512 + 64 channels. The 100 tokens lie in page 2, then in page 0. */
enum { kHeads = 16, kRank = 512, kRow = 576, kPages = 4, kPageSize = 64, kTokens = 100 };
static const float kSmScale = 0.0721688F; /* 1 / sqrt(128 + 64) */

static float rows[kTokens][kRow], q[kHeads][kRow], o[kHeads][kRank], lse[kHeads];
static uint16_t cache[kPages][kPageSize][kRow]; /* bf16 */
static int64_t slots[kTokens];
static int32_t block_table[] = {2, 0}, kv_len[] = {kTokens};

static void check(int code, const char* call) {
  if (code == MLA_OK) return;
  fprintf(stderr, "%s: %s\n", call, mla_last_error());
  exit(1);
}
#define CHECK(call) check(call, #call)

/* A tensor is DLPack's DLTensor: without strides its rows lie one behind the other. */
static mla_tensor tensor(void* data, uint8_t code, uint8_t bits, int32_t ndim, int64_t* shape) {
  mla_tensor t = {0};
  t.data = data;
  t.device.device_type = MLA_DEVICE_CPU;
  t.ndim = ndim;
  t.dtype.code = code;
  t.dtype.bits = bits;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

/* Returns a number between -1 and 1 that bf16 holds exactly. */
static float next_value(void) {
  static uint32_t state = 1;
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return (float)((int)(state >> 25) - 64) / 64.0F;
}

/* Returns the largest difference to attention in double. */
static double largest_difference(void) {
  double worst = 0.0;
  for (int h = 0; h < kHeads; ++h) {
    double weight[kTokens], sum = 0.0;
    for (int t = 0; t < kTokens; ++t) {
      double score = 0.0;
      for (int d = 0; d < kRow; ++d) score += (double)q[h][d] * rows[t][d];
      sum += weight[t] = exp(kSmScale * score);
    }
    worst = fmax(worst, fabs(lse[h] - log(sum)));
    for (int d = 0; d < kRank; ++d) {
      double expected = 0.0;
      for (int t = 0; t < kTokens; ++t) expected += weight[t] / sum * rows[t][d];
      worst = fmax(worst, fabs(o[h][d] - expected));
    }
  }
  return worst;
}

int main(void) {
  for (int t = 0; t < kTokens; ++t) {
    for (int d = 0; d < kRow; ++d) rows[t][d] = next_value();
    slots[t] = (int64_t)block_table[t / kPageSize] * kPageSize + t % kPageSize;
  }
  for (int h = 0; h < kHeads; ++h)
    for (int d = 0; d < kRow; ++d) q[h][d] = next_value();

  int64_t rows_shape[] = {kTokens, kRow}, cache_shape[] = {kPages, kPageSize, kRow}, table_shape[] = {1, 2},
          one[] = {1};
  int64_t q_shape[] = {1, kHeads, kRow}, o_shape[] = {1, kHeads, kRank}, lse_shape[] = {1, kHeads},
          slots_shape[] = {kTokens};
  const mla_tensor rows_view = tensor(rows, MLA_DTYPE_FLOAT, 32, 2, rows_shape);
  const mla_tensor slots_view = tensor(slots, MLA_DTYPE_INT, 64, 1, slots_shape);
  const mla_tensor cache_view = tensor(cache, MLA_DTYPE_BFLOAT, 16, 3, cache_shape);
  const mla_tensor table_view = tensor(block_table, MLA_DTYPE_INT, 32, 2, table_shape);
  const mla_tensor kv_len_view = tensor(kv_len, MLA_DTYPE_INT, 32, 1, one);
  const mla_tensor q_view = tensor(q, MLA_DTYPE_FLOAT, 32, 3, q_shape);
  const mla_tensor o_view = tensor(o, MLA_DTYPE_FLOAT, 32, 3, o_shape);
  const mla_tensor lse_view = tensor(lse, MLA_DTYPE_FLOAT, 32, 2, lse_shape);

  mla_context* context = NULL;
  CHECK(mla_context_create(NULL, &context)); /* all processors, the best backend */

  mla_append_params append = mla_append_params_init();
  append.kv = &rows_view;
  append.slot_mapping = &slots_view;
  append.cache.format = MLA_CACHE_BF16;
  append.cache.kv = &cache_view;
  CHECK(mla_append_run(context, &append));

  mla_decode_params decode = mla_decode_params_init();
  decode.q = &q_view;
  decode.cache = append.cache;
  decode.pages.block_table = &table_view;
  decode.pages.kv_len = &kv_len_view;
  decode.sm_scale = kSmScale;
  decode.o = &o_view;
  decode.lse = &lse_view;

  /* A batch is planned once, into memory of the caller's, and run once for each layer. */
  size_t bytes = 0;
  CHECK(mla_decode_workspace_size(context, &decode, &bytes));
  void* workspace = malloc(bytes);
  mla_plan* plan = NULL;
  CHECK(mla_decode_plan(context, &decode, workspace, bytes, &plan));
  CHECK(mla_decode_run(context, plan, &decode));

  const double worst = largest_difference();
  const int equal = worst < 0.01; /* some backends round the weights of the softmax to bf16 */
  printf("backend %s: %s attention in double, largest difference %.1e\n", mla_plan_backend(plan),
         equal ? "equal to" : "DIFFERENT FROM", worst);
  mla_plan_destroy(plan);
  mla_context_destroy(context);
  free(workspace);
  return equal ? 0 : 1;
}
