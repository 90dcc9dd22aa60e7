// SPDX-License-Identifier: Apache-2.0
#include "operation.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <utility>

namespace mla::python {
namespace {

constexpr std::string_view kIntegers[] = {"kv_len",       "block_table", "kv_indptr",   "kv_indices",  "qo_indptr",
                                          "tree_parents", "indices",     "topk_length", "token_start", "out_indptr",
                                          "from_pages",   "to_pages",    "lengths",     "state_table", "starts",
                                          "blocks",       "key_begin",   "key_end"};
constexpr std::string_view kLongIntegers[] = {"slot_mapping", "positions"};

bool among(std::span<const std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Returns how messages name the part of a cache, given as one tensor or as a pair, that a field holds.
std::string_view part_of_pair(std::string_view field) {
  if (field == "ckv") return "[0]";
  return field == "kpe" ? "[1]" : "";
}

/// Returns ", whose rows of 528 bytes are fp8_nope's" or the like; nothing unless some format has such rows of bytes.
std::string formats_of_rows(const DLTensor& rows) {
  if (rows.ndim == 0 || dtype_of(rows.dtype) != DType::kU8) return {};
  const int64_t bytes = rows.shape[rows.ndim - 1];
  std::string names;
  for (const CacheFormat format : kAllCacheFormats) {
    if (!kv_layout(format).is_packed() || page_bytes(format, 0, 1, false) != bytes) continue;
    names.append(names.empty() ? "" : " or ").append(name(format));
  }
  return names.empty() ? names : ", whose rows of " + std::to_string(bytes) + " bytes may be those of " + names;
}

CacheFormat format_of(const Arguments& args, std::string_view cache, const std::string& text, ffi::AnyView rows) {
  if (const auto format = parse_cache_format(text)) return *format;
  if (!text.empty()) args.fail("ValueError", {cache, ".format"}, format_names(), text);
  if (const auto tensor = rows.try_cast<DLTensor*>()) {
    if (const auto format = format_of_elements(dtype_of((*tensor)->dtype))) return *format;
    args.fail("TypeError", cache, "a KvCache, which names its format, or a tensor of bf16, f16 or e4m3",
              "elements of " + type_name((*tensor)->dtype) + formats_of_rows(**tensor));
  }
  return CacheFormat::kBF16;
}

/// Returns how one-byte elements of a cache's rows are to be read.
Bytes bytes_of_rows(CacheFormat format) {
  const KvLayout layout = kv_layout(format);
  if (layout.is_packed()) return Bytes::kRaw;
  return layout.nope.element == DType::kE4M3 ? Bytes::kE4M3 : Bytes::kAsGiven;
}

std::vector<const Operation*>& operations() {
  static std::vector<const Operation*> all;
  return all;
}

/// Reads the name of an operation, and returns to Python the names of what it passes, in order.
void arguments_of(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("arguments", packed);
  const std::string name = args.text("operation");
  args.end();
  for (const Operation* operation : operations())
    if (operation->name() == name) {
      ffi::Array<ffi::String> names;
      for (const std::string& argument : operation->arguments()) names.push_back(argument);
      *result = names;
      return;
    }
  args.fail("ValueError", "operation", "one of those that libmla knows", name);
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def_packed("libmla.arguments", arguments_of); }

}  // namespace

void define(const Operation& operation) { operations().push_back(&operation); }

void Operation::add(const std::string& path, std::string_view field, Bytes bytes) {
  Argument argument;
  argument.path = path + std::string(field);
  argument.bytes = bytes;
  if (!among(definition_.left_out, argument.path)) {
    const Status path_alone = Status::naming_fields(StatusCode::kInvalidArgument, '`' + argument.path + '`');
    argument.name = path_alone.renamed(definition_.names).message();
  }
  if (among(definition_.e4m3, argument.path)) argument.bytes = Bytes::kE4M3;
  if (among(kIntegers, field)) argument.integers = DType::kI32;
  if (among(kLongIntegers, field)) argument.integers = DType::kI64;
  fields_.push_back(std::move(argument));
}

std::vector<std::string> Operation::arguments() const {
  std::vector<std::string> all;
  for (const Argument& argument : fields_)
    if (!argument.name.empty()) all.push_back(argument.name);
  all.insert(all.end(), definition_.more.begin(), definition_.more.end());
  return all;
}

OperationArguments::OperationArguments(const Operation& operation, ffi::PackedArgs packed)
    : Arguments(operation.name(), packed), field_(operation.fields().begin()) {
  call_fields(operation.names());
  more_ = operation.more();
  first_more_ = packed.size() - static_cast<int>(more_.size());
}

void OperationArguments::convert(const Argument& argument, TensorView& field) {
  field = argument.integers != DType::kNone ? integers(argument.name, argument.integers)
                                            : tensor(argument.name, argument.bytes);
}

void OperationArguments::convert(const Argument& argument, int32_t& field) {
  field = argument.name == "page_size" ? count(argument.name) : integer(argument.name);
}

void OperationArguments::convert(const Argument& argument, LseBase& field) {
  const std::string base = text(argument.name);
  if (base != "e" && base != "2") fail("ValueError", argument.name, "\"e\" or \"2\"", '"' + base + '"');
  field = base == "e" ? LseBase::kE : LseBase::kTwo;
}

void OperationArguments::convert(const Argument& argument, Compute& field) { field = compute(argument.name); }

void OperationArguments::convert(const Argument& argument, IndexerFormat& field) {
  const std::string given = text(argument.name);
  const auto format = parse_indexer_format(given);
  if (!format) fail("ValueError", argument.name, indexer_format_names(), '"' + given + '"');
  field = *format;
}

void OperationArguments::convert(const Argument& argument, LengthPer& field) {
  if (next_is_none()) {
    next(argument.name);
    return;
  }
  const std::string per = text(argument.name);
  if (per != "token" && per != "request")
    fail("ValueError", argument.name, "\"token\", \"request\" or None", '"' + per + '"');
  field = per == "token" ? LengthPer::kToken : LengthPer::kRequest;
}

void OperationArguments::convert(const Argument& argument, ContextParallel& field) {
  const ffi::AnyView value = next(argument.name);
  if (is_none(value)) return;
  const auto share = value.try_cast<ffi::Array<int64_t>>();
  if (!share || share->size() != 3) wrong_type(argument.name, "(rank, world, interleave)", value);
  const auto at = [&](int64_t i) {
    const int64_t number = (*share)[i];
    if (number != static_cast<int32_t>(number))
      fail("ValueError", argument.name, "ints of 32 bits", std::to_string(number));
    return static_cast<int32_t>(number);
  };
  field = {.rank = at(0), .world = at(1), .interleave = at(2)};
}

void OperationArguments::read(KvCache& cache) {
  const Argument& first = *field_;
  const auto without_field = [](std::string_view text) { return text.substr(0, text.rfind('.')); };
  const std::string_view name = without_field(first.name);
  const ffi::AnyView format = args_[read_];
  bool bare = false;
  ffi::AnyView rows;
  if (!is_none(format)) {
    const auto text = format.try_cast<ffi::String>();
    if (!text) wrong_type(first.name, "a str", format);
    bare = text->empty();
    for (int i = read_ + 1; is_none(rows) && i < args_.size() && i <= read_ + 2; ++i) rows = args_[i];  // kv, ckv
    cache.format = format_of(*this, name, *text, rows);
    if (bare) name_bare_cache({.name = name, .path = without_field(first.path)});
  }
  const Bytes bytes = bytes_of_rows(cache.format);
  for_each_field(cache, [&](std::string_view field_name, auto& field) {
    using Type = std::remove_reference_t<decltype(field)>;
    const Argument& argument = *field_++;
    if (is_none(format) || &argument == &first || (std::is_same_v<Type, TensorView> && next_is_none())) {
      ++read_;
      return;
    }
    if constexpr (std::is_same_v<Type, TensorView>) {
      const Bytes elements = field_name.ends_with("_scale") ? Bytes::kAsGiven : bytes;
      field = bare ? tensor({name, part_of_pair(field_name)}, elements) : tensor(argument.name, elements);
    } else if constexpr (!std::is_same_v<Type, CacheFormat>) {
      convert(argument, field);
    }
  });
}

}  // namespace mla::python
