// SPDX-License-Identifier: Apache-2.0
#include "plan/shared_prefix.h"

#include <algorithm>

namespace mla::schedule {
namespace {

int32_t common_pages(const core::SharedPrefixArgs& args, int32_t request) {
  if (request == 0) return 0;
  const int32_t most = std::min(args.full_pages(request - 1), args.full_pages(request));
  const int32_t* const before = args.pages.table + args.table_begin(request - 1);
  const int32_t* const own = args.pages.table + args.table_begin(request);
  return static_cast<int32_t>(std::mismatch(own, own + most, before).first - own);
}

/// Calls length(entry, value) for every entry of the lists that work is planned by, and place(entry, value) for the
/// others.
template <class Length, class Place>
SharedPrefixes visit_lists(const core::SharedPrefixArgs& args, const Length& length, const Place& place) {
  const int32_t batch = args.batch_size;
  for (int32_t b = 0; b < batch; ++b) args.common_pages[b] = common_pages(args, b);
  const auto common = [&](int32_t b) { return b < batch ? args.common_pages[b] : 0; };

  SharedPrefixes found;
  int32_t groups = 0;
  for (int32_t first = 0; first < batch; ++groups) {
    core::PrefixGroup group;
    int32_t end = first + 1;
    while (end < batch && group.take(common(end), common(end + 1))) ++end;
    const auto pages = static_cast<int32_t>(group.pages);
    const int32_t keys = pages * args.pages.page_size;
    length(args.group_qo_indptr[groups], args.queries.begin(first));
    length(args.group_kv_len[groups], keys);
    place(args.group_kv_indptr[groups], args.table_begin(first));
    for (int32_t b = first; b < end; ++b) {
      length(args.own_kv_len[b], args.kv_len(b) - keys);
      place(args.own_kv_indptr[b], args.table_begin(b) + pages);
    }
    found.num_groups += pages > 0 ? 1 : 0;
    found.saved_keys += int64_t{keys} * (end - first - 1);
    first = end;
  }
  place(args.own_kv_indptr[batch], args.table_begin(batch));
  for (int32_t g = groups; g <= batch; ++g) {
    length(args.group_qo_indptr[g], args.queries.begin(batch));
    place(args.group_kv_indptr[g], args.table_begin(batch));
    if (g < batch) length(args.group_kv_len[g], 0);
  }
  return found;
}

}  // namespace

SharedPrefixes find_shared_prefixes(const core::SharedPrefixArgs& args) {
  const auto set = [](int32_t& entry, int32_t value) { entry = value; };
  return visit_lists(args, set, set);
}

bool same_shared_prefixes(const core::SharedPrefixArgs& args) {
  bool same = true;
  visit_lists(
      args, [&](int32_t entry, int32_t value) { same = same && entry == value; }, [](int32_t, int32_t) {});
  return same;
}

}  // namespace mla::schedule
