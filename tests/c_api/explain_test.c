/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what is said of backends, and what they say of a problem. */
#include "c_api_test.h"

void test_listing(void) {
  CHECK(strchr(mla_version(), '.') != NULL);
  size_t count = 0;
  const char* name = NULL;
  for (int32_t op = MLA_DECODE; op <= MLA_INDEXER_TOP_K; ++op) {
    CHECK(mla_backend_count(op, &count) == MLA_OK);
    CHECK(count >= 1);
    CHECK(mla_backend_name(op, count - 1, &name) == MLA_OK);
    CHECK(strcmp(name, "reference") == 0);
    CHECK(mla_backend_name(op, count, &name) == MLA_INVALID_ARGUMENT);
  }
  CHECK_ERROR(mla_backend_count(17, &count), MLA_INVALID_ARGUMENT, "backend_count: op: expected 0 to 16, got 17");

  mla_problem wanted = mla_problem_init();
  char text[4096];
  size_t length = 0;
  CHECK(mla_explain(&wanted, "reference", text, sizeof text, &length) == MLA_OK);
  CHECK(strlen(text) == length);
  CHECK(strstr(text, "reference: yes, ") != NULL);
  CHECK(strstr(text, "selected: reference\n") != NULL);
  char few[5] = "????";
  CHECK(mla_explain(&wanted, "reference", few, sizeof few, &length) == MLA_OK);
  CHECK(strncmp(few, text, 4) == 0 && few[4] == '\0');
  CHECK(mla_explain(&wanted, NULL, NULL, 0, &length) == MLA_OK);
  CHECK(length > 0);
  wanted.device.device_type = MLA_DEVICE_CUDA;
  CHECK(mla_explain(&wanted, NULL, text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "selected: none, ") != NULL);
  wanted = mla_problem_init();
  wanted.device.device_type = MLA_DEVICE_CUDA;
  wanted.gpu_arch = 120;
  wanted.full_build = 1;
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "cuda_portable: yes, mma.sync kernels compiled for sm120") != NULL);
  CHECK(strstr(text, "selected: cuda_portable\n") != NULL);
  wanted = mla_problem_init();
  wanted.compute = MLA_COMPUTE_FP8;
  CHECK(mla_explain(&wanted, NULL, text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "reference: no, compute fp8 is for quantized caches, not for bf16\n") != NULL);
  wanted.cache_format = MLA_CACHE_FP8_DS_MLA;
  CHECK(mla_explain(&wanted, NULL, text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "reference: yes, ") != NULL);
  wanted.compute = 3;
  CHECK_ERROR(mla_explain(&wanted, NULL, text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: compute: expected MLA_COMPUTE_DEFAULT, MLA_COMPUTE_FP8 or MLA_COMPUTE_EXACT, got 3");
  wanted.compute = MLA_COMPUTE_DEFAULT;
  wanted.indexer_format = 2;
  CHECK_ERROR(mla_explain(&wanted, NULL, text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: indexer_format: expected 0 to 1, got 2");
  wanted.indexer_format = MLA_INDEXER_MXFP4;
  wanted.op = MLA_INDEXER_LOGITS;
  wanted.q_dtype.code = MLA_DTYPE_FLOAT;
  wanted.gpu_arch = 90;
  wanted.device.device_type = MLA_DEVICE_CUDA;
  CHECK(mla_explain(&wanted, NULL, text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "takes e4m3 and bf16 queries with mxfp4 keys, not f16\n") != NULL);
  wanted.q_dtype.code = MLA_DTYPE_BFLOAT;
  wanted.num_heads = 121;
  wanted.logits_dtype = wanted.q_dtype;
  CHECK(mla_explain(&wanted, NULL, text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "takes at most 120 heads where logits are bf16, not 121\n") != NULL);
  wanted.logits_dtype.bits = 8;
  CHECK_ERROR(mla_explain(&wanted, NULL, text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: logits_dtype: expected f32, bf16 or f16, got none");
  wanted.cache_format = 77;
  CHECK_ERROR(mla_explain(&wanted, NULL, text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: cache_format: expected 0 to 12, got 77");
}

void test_verdicts(void) {
  mla_problem wanted = mla_problem_init();
  size_t count = 0;
  CHECK(mla_backend_count(MLA_DECODE, &count) == MLA_OK);

  /* The oracle, which is the last, computes in float64. */
  mla_verdict verdict = mla_verdict_init();
  CHECK(mla_explain_backend(&wanted, count - 1, &verdict) == MLA_OK);
  CHECK(verdict.struct_size == sizeof verdict);
  CHECK(strcmp(verdict.backend, "reference") == 0);
  CHECK(verdict.usable == 1);
  CHECK(verdict.multiplied == MLA_ARITHMETIC_F64 && verdict.summed == MLA_ARITHMETIC_F64);
  CHECK(verdict.products_per_cut == 0 && verdict.query_bits == 24 && verdict.sum_bits == 24 && verdict.p_run == 32 &&
        verdict.reserved == 0);

  /* A portable kernel, on a GPU that it is not for: tensor cores multiply the type of the queries. */
  size_t index = 0;
  const char* name = "";
  for (size_t i = 0; i < count && strcmp(name, "cuda_portable") != 0; ++i) {
    CHECK(mla_backend_name(MLA_DECODE, i, &name) == MLA_OK);
    index = i;
  }
  wanted.device.device_type = MLA_DEVICE_CUDA;
  wanted.gpu_arch = 75;
  CHECK(mla_explain_backend(&wanted, index, &verdict) == MLA_OK);
  CHECK(strcmp(verdict.backend, "cuda_portable") == 0);
  CHECK(verdict.usable == 0);
  CHECK(verdict.multiplied == MLA_ARITHMETIC_BF16 && verdict.summed == MLA_ARITHMETIC_F32);
  CHECK(verdict.products_per_cut > 0);
  wanted.q_dtype.code = MLA_DTYPE_FLOAT;
  wanted.cache_format = MLA_CACHE_F16;
  CHECK(mla_explain_backend(&wanted, index, &verdict) == MLA_OK);
  CHECK(verdict.multiplied == MLA_ARITHMETIC_F16);

  char message[80];
  snprintf(message, sizeof message, "explain: index: expected less than %zu, got %zu", count, count);
  CHECK_ERROR(mla_explain_backend(&wanted, count, &verdict), MLA_INVALID_ARGUMENT, message);
  CHECK_ERROR(mla_explain_backend(&wanted, 0, NULL), MLA_INVALID_ARGUMENT,
              "explain: out: expected a pointer, got null");
  wanted.d_v = 0;
  CHECK_ERROR(mla_explain_backend(&wanted, 0, &verdict), MLA_INVALID_ARGUMENT,
              "explain: d_v: expected at least 1, got 0");

  /* A newer caller's struct is longer, and zero where this version knows nothing; a shorter one there is not. */
  wanted = mla_problem_init();
  struct {
    mla_verdict verdict;
    int64_t added;
  } newer;
  memset(&newer, '~', sizeof newer);
  newer.verdict.struct_size = sizeof newer;
  CHECK(mla_explain_backend(&wanted, count - 1, &newer.verdict) == MLA_OK);
  CHECK(newer.verdict.struct_size == sizeof newer && newer.added == 0);
  CHECK(newer.verdict.summed == MLA_ARITHMETIC_F64);
  /* The first version ended before p_run. */
  memset(&verdict, '~', sizeof verdict);
  verdict.struct_size = offsetof(mla_verdict, p_run);
  CHECK(mla_explain_backend(&wanted, count - 1, &verdict) == MLA_OK);
  CHECK(verdict.summed == MLA_ARITHMETIC_F64 && verdict.p_run == 0x7E7E7E7E);
  verdict.struct_size = offsetof(mla_verdict, p_run) - 1;
  verdict.backend = NULL;
  CHECK(mla_explain_backend(&wanted, 0, &verdict) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "explain: struct_size: expected 40 to ") == mla_last_error());
  CHECK(verdict.backend == NULL);
}
