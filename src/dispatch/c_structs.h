// SPDX-License-Identifier: Apache-2.0
// Converts the C ABI's structs to the C++ API's, field by field (mla/fields.h): a field becomes what the C struct has
// under the same name. This file and c_structs.cpp alone say what C keeps elsewhere, or in another form:
// - The scales of a cache stand beside it (`scales`, `from_scales`, `to_scales`), and have any_scales where C++ has
//   power_of_two_scales.
// - A window is set if has_window is 1. In mla_context_parallel, 0 as `world` or `interleave` means 1; so does 0 as
//   `ratio` or `block_size` of what works with the indexer, whose callers may have a struct without them.
// - The topk_length_per of both pools stand at the end of decode_sparse's params, which can grow.
// - indexer_top_k has the indexer's fields among its own, and the indexer's page table as `indexer_pages`.
// A nested struct that has no room for a new field leaves it to the params around it, which can grow. One that grows by
// itself is given by a pointer; null: it has its defaults.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch/c_versions.h"
#include "mla/c_api.h"
#include "mla/fields.h"
#include "mla/status.h"

namespace mla::dispatch {

/// Returns the value of an enumeration of one byte. What does not fit becomes 255, which validation refuses.
template <class Enum>
constexpr Enum enumeration(int32_t value) {
  return value >= 0 && value < 256 ? static_cast<Enum>(value) : Enum{255};
}

/// Returns the element type; kNone if the library has no such type.
DType dtype_of(mla_dtype dtype);

/// Says where a field stands. Its text is made only for an error.
struct FieldPath {
  const FieldPath* outer = nullptr;  ///< null: in the params themselves
  std::string_view name = {};        ///< empty: as if the outer struct had the fields

  std::string text() const;
};

/// Holds a C struct, and says where it stands.
template <class C>
struct Given {
  const C& fields;
  FieldPath at;
};

/// Converts structs. `status` is the error of the first field that cannot be converted.
class StructReader {
 public:
  /// If `names` is not null, it gets every field that C names otherwise: its paths in mla/params.h and in C.
  using Names = std::vector<std::pair<std::string, std::string>>;
  explicit StructReader(Op op, Names* names = nullptr) : op_(op), names_(names) {}

  template <class Params, class C>
  void read_params(Params& params, const C& fields) {
    const Given<C> given = {fields, {}};
    check_reserved(given);
    read({}, params, given);
    settle(params, given);
  }
  const Status& status() const { return status_; }

 private:
  /// Reads the fields of `params`, a struct that stands at `path`: each from the first of the given structs that has
  /// it.
  template <class Params, class... C>
  void read(const FieldPath& path, Params& params, const Given<C>&... given);

  // These functions convert a value of C to a field's.
  void convert(const FieldPath& at, const mla_tensor* tensor, TensorView& field);
  void convert(const FieldPath& at, int32_t value, bool& field);
  void convert(const FieldPath& at, int32_t value, LseBase& field);
  void convert(const FieldPath& at, int32_t value, Compute& field);
  void convert(const FieldPath&, int32_t value, int32_t& field) { field = value; }
  void convert(const FieldPath&, float value, float& field) { field = value; }
  void convert(const FieldPath&, int32_t value, CacheFormat& field) { field = enumeration<CacheFormat>(value); }
  void convert(const FieldPath&, int32_t value, IndexerFormat& field) { field = enumeration<IndexerFormat>(value); }

  // These functions convert what C says in another form, once the fields of one name are read.
  template <class Params, class C>
  void settle(Params&, const Given<C>&) {}
  void settle(AttentionOptions& options, const Given<mla_attention_options>& given);
  void settle(ContextParallel& share, const Given<mla_context_parallel>& given);
  void settle(KvCache& cache, const Given<mla_cache_scales>& given);
  void settle(AppendIndexerParams& params, const Given<mla_append_indexer_params>& given);
  void settle(CompressParams& params, const Given<mla_compress_params>& given);
  void settle(FinishOutputParams& params, const Given<mla_finish_output_params>& given);
  void settle(PhysicalSlotsParams& params, const Given<mla_physical_slots_params>& given);
  void settle(IndexerLogitsParams& params, const Given<mla_indexer_logits_params>& given);
  void settle(TopKParams& params, const Given<mla_top_k_params>& given);
  void settle(IndexerTopKParams& params, const Given<mla_indexer_top_k_params>& given);
  void settle(DecodeSparseParams& params, const Given<mla_decode_sparse_params>& given);
  template <class C>
  void settle_scales(OutputFinish& finish, const Given<C>& given);

  template <class Member, class Field, class First, class... Rest>
  void read_member(const FieldPath& path, Member member, Field& field, const Given<First>& first,
                   const Given<Rest>&... rest);
  template <class Member, class Params, class Outer, class... Rest>
  void read_nested(const FieldPath& path, Member member, Params& params, const Given<Outer>& outer,
                   const Given<Rest>&... rest);
  template <class C>
  void check_reserved(const Given<C>& given) {
    if constexpr (requires { given.fields.reserved; }) zero({&given.at, "reserved"}, given.fields.reserved);
  }

  void zero(const FieldPath& at, int32_t value);
  void fail(const FieldPath& at, std::string text);
  void note(const FieldPath& path, const FieldPath& in_c);

  Op op_;
  Names* names_;
  Status status_;
};

/// Returns the scales of the cache that `outer` has under the name `cache`.
template <class Outer>
Given<mla_cache_scales> scales_beside(const Given<Outer>& outer, std::string_view cache) {
  if constexpr (requires { outer.fields.scales; })
    return {outer.fields.scales, {&outer.at, "scales"}};
  else if (cache == "from")
    return {outer.fields.from_scales, {&outer.at, "from_scales"}};
  else
    return {outer.fields.to_scales, {&outer.at, "to_scales"}};
}

/// Says whether a struct of C has that field.
template <class Member, class C>
concept HasMember = requires(Member member, const C& fields) {
  member.of(fields);
};
template <class C>
concept SaysAnyScales = requires(const C& fields) {
  fields.any_scales;
};

template <class Params, class... C>
void StructReader::read(const FieldPath& path, Params& params, const Given<C>&... given) {
  for_each_member<Params>([&](auto member) {
    auto& field = member.of(params);
    using Field = std::remove_reference_t<decltype(field)>;
    constexpr bool kFound = (HasMember<decltype(member), C> || ...);
    constexpr bool kAnyScales = std::is_same_v<Field, bool> && !kFound && (SaysAnyScales<C> || ...);
    constexpr bool kSettled = std::is_same_v<Field, LengthPer> || kAnyScales;
    static_assert(HasFields<Field> || kFound || kSettled, "mla/c_api.h lacks a field of mla/params.h");
    if constexpr (HasFields<Field>)
      read_nested(path, member, field, given...);
    else if constexpr (!kSettled)
      read_member(path, member, field, given...);
  });
}

template <class Member, class Field, class First, class... Rest>
void StructReader::read_member(const FieldPath& path, Member member, Field& field, const Given<First>& first,
                               const Given<Rest>&... rest) {
  if constexpr (HasMember<Member, First>) {
    const FieldPath in_c = {&first.at, member.name};
    convert(in_c, member.of(first.fields), field);
    note({&path, member.name}, in_c);
  } else {
    read_member(path, member, field, rest...);
  }
}

template <class Member, class Params, class Outer, class... Rest>
void StructReader::read_nested(const FieldPath& path, Member member, Params& params, const Given<Outer>& outer,
                               const Given<Rest>&... rest) {
  // Messages name the fields of a page table as if they stood in the struct that has it.
  constexpr bool kPages = std::is_same_v<Params, PageTable>;
  const FieldPath here = {&path, kPages ? std::string_view() : member.name};
  const auto read_from = [&](const auto&... inner) {
    (check_reserved(inner), ...);
    read(here, params, inner..., outer);
    (settle(params, inner), ...);
  };
  if constexpr (kPages && requires { outer.fields.indexer_pages; }) {
    const bool of_indexer = path.name == "indexer";
    read_from(Given<mla_page_table>{of_indexer ? outer.fields.indexer_pages : outer.fields.pages,
                                    {&outer.at, of_indexer ? "indexer_pages" : "pages"}});
  } else if constexpr (requires { member.of(outer.fields)->struct_size; }) {
    const auto* const given = member.of(outer.fields);
    const FieldPath at = {&outer.at, member.name};
    if (given == nullptr) return;
    std::remove_cvref_t<decltype(*given)> copy;
    if (Status status = read_struct(core::format("{}: {}", name(op_), at.text()), given, copy); !status.ok()) {
      if (status_.ok()) status_ = std::move(status);
      return;
    }
    read_from(Given<decltype(copy)>{copy, at});
  } else if constexpr (HasMember<Member, Outer>) {
    using Inner = std::remove_cvref_t<decltype(member.of(outer.fields))>;
    const Given<Inner> inner = {member.of(outer.fields), {&outer.at, here.name}};
    if constexpr (std::is_same_v<Params, KvCache>)
      read_from(inner, scales_beside(outer, member.name));
    else
      read_from(inner);
    note(here, inner.at);
  } else if constexpr (sizeof...(Rest) > 0) {
    read_nested(path, member, params, rest...);
  } else {
    read(here, params, outer);
    if (names_ != nullptr) names_->emplace_back(here.text() + '.', outer.at.text());
  }
}

/// Names the type of the C++ params that a C struct holds.
template <class C>
struct ParamsOf;
template <>
struct ParamsOf<mla_decode_params> : std::type_identity<DecodeParams> {};
template <>
struct ParamsOf<mla_prefill_params> : std::type_identity<PrefillParams> {};
template <>
struct ParamsOf<mla_merge_states_params> : std::type_identity<MergeStatesParams> {};
template <>
struct ParamsOf<mla_append_params> : std::type_identity<AppendParams> {};
template <>
struct ParamsOf<mla_gather_params> : std::type_identity<GatherParams> {};
template <>
struct ParamsOf<mla_decode_sparse_params> : std::type_identity<DecodeSparseParams> {};
template <>
struct ParamsOf<mla_prefill_sparse_params> : std::type_identity<PrefillSparseParams> {};
template <>
struct ParamsOf<mla_append_rope_params> : std::type_identity<AppendRopeParams> {};
template <>
struct ParamsOf<mla_copy_pages_params> : std::type_identity<CopyPagesParams> {};
template <>
struct ParamsOf<mla_block_table_to_csr_params> : std::type_identity<BlockTableToCsrParams> {};
template <>
struct ParamsOf<mla_physical_slots_params> : std::type_identity<PhysicalSlotsParams> {};
template <>
struct ParamsOf<mla_append_indexer_params> : std::type_identity<AppendIndexerParams> {};
template <>
struct ParamsOf<mla_indexer_logits_params> : std::type_identity<IndexerLogitsParams> {};
template <>
struct ParamsOf<mla_top_k_params> : std::type_identity<TopKParams> {};
template <>
struct ParamsOf<mla_indexer_top_k_params> : std::type_identity<IndexerTopKParams> {};
template <>
struct ParamsOf<mla_compress_params> : std::type_identity<CompressParams> {};
template <>
struct ParamsOf<mla_finish_output_params> : std::type_identity<FinishOutputParams> {};

/// Returns the params that a C struct holds. The reader's status says whether they could be converted.
template <class C>
typename ParamsOf<C>::type read(const C& fields, StructReader& reader) {
  typename ParamsOf<C>::type params;
  reader.read_params(params, fields);
  return params;
}

/// Returns a status that names fields as mla/params.h does, with C's names instead.
template <class C>
Status named_as_in_c(const Status& status, const C& fields) {
  StructReader::Names names;
  StructReader reader({}, &names);
  read(fields, reader);
  std::vector<FieldName> table;
  for (const auto& [field, name] : names) table.push_back({field, name});
  return status.renamed(table);
}

}  // namespace mla::dispatch
