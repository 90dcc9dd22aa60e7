/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the C ABI from C: every operation against values computed here, and its errors. */
#include "c_api_test.h"

int checks = 0;
int failures = 0;

/* Names the test first, for those who must look into its crash. */
#define RUN(test, arguments) \
  do {                       \
    printf("%s\n", #test);   \
    fflush(stdout);          \
    test arguments;          \
  } while (0)

int main(void) {
  CHECK(strcmp(mla_last_error(), "") == 0);
  mla_context_options options = mla_context_options_init();
  options.num_threads = 2;
  mla_context* context = NULL;
  CHECK(mla_context_create(&options, &context) == MLA_OK);
  CHECK(mla_context_num_threads(context) == 2);
  const int32_t callers_own[] = {-1}; /* the caller's entry is ignored */
  mla_context* alone = NULL;
  options.num_threads = 0;
  options.num_affinity = 1;
  options.affinity = callers_own;
  CHECK(mla_context_create(&options, &alone) == MLA_OK);
  CHECK(mla_context_num_threads(alone) == 1);
  mla_context_destroy(alone);
  RUN(test_decode, (context));
  RUN(test_prefill, (context));
  RUN(test_prefill_of_e4m3, (context));
  RUN(test_merge_states, (context));
  RUN(test_append_and_gather, (context));
  RUN(test_decode_options, (context));
  RUN(test_decode_sparse, (context));
  RUN(test_prefill_sparse, (context));
  RUN(test_writers, (context));
  RUN(test_around_attention, (context));
  RUN(test_compress, (context));
  RUN(test_compress_append, (context));
  RUN(test_compress_errors, (context));
  RUN(test_index_tools, (context));
  RUN(test_indexer, (context));
  RUN(test_errors, (context));
  RUN(test_struct_growth, (context));
  RUN(test_listing, ());
  RUN(test_verdicts, ());
  mla_context_destroy(context);
  printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
