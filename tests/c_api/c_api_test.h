/* SPDX-License-Identifier: Apache-2.0 */
/* Holds what the tests of the C ABI share: checks, tensors, and a problem with its result by definition. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "mla/c_api.h"

extern int checks;
extern int failures;

#define CHECK(condition)                                                                                \
  do {                                                                                                  \
    ++checks;                                                                                           \
    if (!(condition)) {                                                                                 \
      ++failures;                                                                                       \
      printf("%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, mla_last_error()); \
    }                                                                                                   \
  } while (0)

#define CHECK_ERROR(call, code, text)             \
  do {                                            \
    CHECK((call) == (code));                      \
    CHECK(strcmp(mla_last_error(), (text)) == 0); \
  } while (0)

enum { kTokens = 2, kHeads = 3, kCkv = 256, kKpe = 64, kQk = kCkv + kKpe, kPages = 4, kPageSize = 2, kKeys = 5 };

extern const mla_dtype kBf16;
extern const mla_dtype kU8;
extern const mla_dtype kE4m3;
extern const mla_dtype kF32;
extern const mla_dtype kI32;
extern const mla_dtype kI64;

/* On the CPU, row-major. */
mla_tensor tensor(void* data, mla_dtype dtype, int32_t ndim, int64_t* shape);
/* Exact in bf16, and different for every index. */
float value_at(size_t i);
uint16_t to_bf16(float value);
float from_bf16(uint16_t bits);

/* One request of kKeys tokens with kTokens queries, its pages out of order. */
typedef struct problem {
  float q[kTokens * kHeads * kQk];
  uint16_t cache[kPages * kPageSize * kQk];
  int32_t table[3], kv_len[1];
  float o[kTokens * kHeads * kCkv], lse[kTokens * kHeads];
  int64_t q_shape[3], cache_shape[3], table_shape[2], len_shape[1], o_shape[3], lse_shape[2];
  mla_tensor q_tensor, cache_tensor, table_tensor, len_tensor, o_tensor, lse_tensor;
  mla_decode_params params;
} problem;

void fill(problem* p);
const uint16_t* cache_row(const problem* p, int token);
/* Attention of one query by its definition. */
void expect_query(const problem* p, int query, int head);

/* Each is a test. */
void test_decode(const mla_context* context);
void test_prefill(const mla_context* context);
void test_prefill_of_e4m3(const mla_context* context);
void test_merge_states(const mla_context* context);
void test_around_attention(const mla_context* context);
void test_decode_options(const mla_context* context);
void test_decode_sparse(const mla_context* context);
void test_prefill_sparse(const mla_context* context);
void test_append_and_gather(const mla_context* context);
void test_writers(const mla_context* context);
void test_compress(const mla_context* context);
void test_compress_append(const mla_context* context);
void test_compress_errors(const mla_context* context);
void test_index_tools(const mla_context* context);
void test_indexer(const mla_context* context);
void test_errors(const mla_context* context);
void test_struct_growth(const mla_context* context);
void test_listing(void);
void test_verdicts(void);
