/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what is refused and how it is said, and structs of older and newer callers. */
#include "c_api_test.h"

void test_errors(const mla_context* context) {
  static problem p;
  fill(&p);
  size_t size = 12345;
  mla_plan* plan = NULL;
  CHECK_ERROR(mla_decode_workspace_size(NULL, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: context: expected a pointer, got null");
  CHECK_ERROR(mla_decode_workspace_size(context, NULL, &size), MLA_INVALID_ARGUMENT,
              "decode: params: expected a pointer, got null");
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, NULL), MLA_INVALID_ARGUMENT,
              "decode: out: expected a pointer, got null");
  CHECK_ERROR(mla_decode_run(context, NULL, &p.params), MLA_INVALID_ARGUMENT,
              "decode: plan: expected a pointer, got null");
  p.kv_len[0] = 7;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: kv_len: expected at most 6 (3 pages of 2), got 7 for request 0");
  CHECK(size == 12345);
  fill(&p);
  p.q_tensor.dtype.bits = 64;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: q: expected an element type of mla_dtype_code, got code 2, 64 bits, 1 lanes");
  fill(&p);
  p.q_tensor.shape = NULL;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: q: expected a shape of 3 extents, got a null pointer");
  fill(&p);
  p.params.causal = 2;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: causal: expected 0 or 1, got 2");
  fill(&p);
  p.params.lse_base = 300;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: lse_base: expected MLA_LSE_BASE_E or MLA_LSE_BASE_2, got 300");
  fill(&p);
  p.params.lse_inf_without_keys = 2;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: lse_inf_without_keys: expected 0 or 1, got 2");
  fill(&p);
  p.params.scales.ckv_scale = &p.lse_tensor;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: scales.ckv_scale: expected none for bf16, got a tensor");
  fill(&p);
  p.params.cache.format = MLA_CACHE_FP8_DS_MLA;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: q: expected shape [T, H, d_qk = 576], got [2, 3, 320]");
  fill(&p);
  p.params.cache.format = 77;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "decode: cache.format: expected a cache format, got unknown value") != NULL);
  fill(&p);
  p.params.scales.any_scales = 2;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: scales.any_scales: expected 0 or 1, got 2");
  fill(&p);
  p.params.options.window_left = 4;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: options.window_left: expected 0, got 4");
  fill(&p);
  p.params.options.has_window = 1;
  p.params.options.window_left = -1;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: options.window_left: expected at least 0, got -1");
  fill(&p);
  p.params.context_parallel.rank = 2;
  p.params.context_parallel.world = 2;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: context_parallel.rank: expected 0 to 1, got 2");
  fill(&p);
  p.params.struct_size = 8;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "decode: struct_size: expected ") == mla_last_error());
  fill(&p);
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  if (size > 0) {
    char byte = 0;
    CHECK(mla_decode_plan(context, &p.params, &byte, 1, &plan) == MLA_WORKSPACE_TOO_SMALL);
    CHECK(plan == NULL);
  }

  mla_context_options options = mla_context_options_init();
  mla_context* refused = NULL;
  options.num_threads = -5;
  CHECK_ERROR(mla_context_create(&options, &refused), MLA_INVALID_ARGUMENT,
              "context: num_threads: expected 0 to 1024, got -5");
  options = mla_context_options_init();
  options.num_affinity = 2;
  CHECK(mla_context_create(&options, &refused) == MLA_INVALID_ARGUMENT);
  const int32_t nowhere[] = {0, -1};
  options.affinity = nowhere;
  CHECK_ERROR(mla_context_create(&options, &refused), MLA_INVALID_ARGUMENT,
              "context: affinity: expected processors this process may use, got -1 for worker 1");
  CHECK(refused == NULL);
  CHECK(mla_context_create(&options, NULL) == MLA_INVALID_ARGUMENT);
  mla_context_destroy(NULL);
  mla_plan_destroy(NULL);
  CHECK(mla_context_num_threads(NULL) == 0);
  CHECK(strcmp(mla_plan_backend(NULL), "") == 0);
}

/* A newer caller's struct: longer, its unknown fields zero or not. */
void test_struct_growth(const mla_context* context) {
  static problem p;
  fill(&p);
  struct {
    mla_decode_params params;
    int64_t added;
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.params = p.params;
  newer.params.struct_size = sizeof newer;
  size_t size = 0;
  CHECK(mla_decode_workspace_size(context, &newer.params, &size) == MLA_OK);
  newer.added = 1;
  CHECK(mla_decode_workspace_size(context, &newer.params, &size) == MLA_INVALID_ARGUMENT);

  /* An older caller's: shorter, and what follows it is not read. */
  fill(&p);
  p.params.struct_size = offsetof(mla_decode_params, q_scale);
  p.params.context_parallel.rank = -7;
  p.params.options.has_window = 9;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  p.params.struct_size -= 1;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_INVALID_ARGUMENT);

  /* Options and problems of before there were devices. */
  mla_context_options options = mla_context_options_init();
  mla_context* other = NULL;
  options.num_threads = 1;
  options.device = "nonsense";
  CHECK_ERROR(mla_context_create(&options, &other), MLA_INVALID_ARGUMENT,
              "context: device: expected cpu, cuda, cuda:<index> or emulated:sm<arch>, got \"nonsense\"");
  options.struct_size = offsetof(mla_context_options, device);
  CHECK(mla_context_create(&options, &other) == MLA_OK);
  mla_context_destroy(other);
  mla_problem wanted = mla_problem_init();
  wanted.device.device_type = MLA_DEVICE_CUDA;
  wanted.gpu_arch = 75;
  char text[4096];
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "cuda_portable: no, needs sm80 or newer, not sm75") != NULL);
  wanted.struct_size = offsetof(mla_problem, gpu_arch);
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "not sm75") == NULL);
  /* Problems of before they said how many queries there are. */
  wanted = mla_problem_init();
  CHECK(wanted.q_len == 1);
  wanted.device.device_type = MLA_DEVICE_CUDA;
  wanted.gpu_arch = 90;
  wanted.emulated = 1;
  wanted.num_heads = 8;
  wanted.q_len = 2;
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "cuda_sm90: no, takes requests of more than 16 query rows (tokens x heads), not 16") != NULL);
  wanted.struct_size = offsetof(mla_problem, q_len);
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "not 8") != NULL);
  wanted.struct_size = sizeof wanted;
  wanted.q_len = -1;
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: q_len: expected at least 0, got -1");
  wanted = mla_problem_init();
  CHECK(wanted.listed_keys == 0);
  wanted.listed_keys = -1;
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: listed_keys: expected at least 0, got -1");
  wanted = mla_problem_init();
  CHECK(wanted.num_requests == 0);
  wanted.num_requests = -1;
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: num_requests: expected at least 0, got -1");
  /* Problems of before they said how many requests there are, which may be many. */
  wanted = mla_problem_init();
  wanted.device.device_type = MLA_DEVICE_CUDA;
  wanted.gpu_arch = 90;
  wanted.emulated = 1;
  wanted.num_heads = 32;
  wanted.num_requests = 1;
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "cuda_sm90: yes, can, but leaves up to 32 query heads") != NULL ||
        !strstr(text, "cuda_sm90: yes"));
  wanted.struct_size = offsetof(mla_problem, num_requests);
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "leaves up to 32 query heads") == NULL);
  wanted = mla_problem_init();
  wanted.num_heads = 0;
  memset(text, '~', sizeof text);
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: num_heads: expected at least 1, got 0");
  CHECK(text[0] == '~');
  wanted = mla_problem_init();
  wanted.d_v = -1;
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: d_v: expected at least 1, got -1");
}
