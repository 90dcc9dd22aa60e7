// SPDX-License-Identifier: Apache-2.0
// Tells python/libmla what the library knows of the machine, of its backends and of its formats, as JSON or as a
// number.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <nlohmann/json.hpp>

#include "arguments.h"

namespace mla::python {
namespace {

using Json = nlohmann::ordered_json;

Json rows_of(const Explanation& explanation) {
  Json rows = Json::array();
  for (const BackendVerdict& row : explanation.rows)
    rows.push_back({{"backend", row.name},
                    {"usable", row.usable},
                    {"reason", row.reason},
                    {"multiplied", name(row.numerics.multiplied)},
                    {"summed", name(row.numerics.summed)},
                    {"products_per_cut", row.numerics.products_per_cut},
                    {"query_bits", row.numerics.query_bits},
                    {"sum_bits", row.numerics.sum_bits},
                    {"p_run", row.numerics.p_run}});
  return rows;
}

Json code_of(const Explanation& explanation) {
  if (!explanation.code) return nullptr;
  const GpuCode& code = *explanation.code;
  return {{"arch", code.arch},
          {"family", code.family},
          {"by_driver", code.by_driver},
          {"built", code.built},
          {"text", code_text(code)}};
}

Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

void info(ffi::PackedArgs, ffi::Any* result) {
  const MachineInfo& machine = machine_info();
  Json isa = Json::array();
  for (const IsaLevel& level : machine.isa)
    isa.push_back({{"name", level.name},
                   {"cpu_has", level.cpu_has},
                   {"os_allows", level.os_allows},
                   {"built", level.built},
                   {"gflops", level.gflops > 0 ? Json(level.gflops) : Json(nullptr)},
                   {"detail", level.detail}});
  Json gpus = Json::array();
  for (const GpuInfo& gpu : machine.gpus)
    gpus.push_back({{"name", gpu.name},
                    {"bus_location", gpu.bus_location},
                    {"uuid", gpu.uuid},
                    {"index", gpu.index},
                    {"arch", gpu.arch},
                    {"num_sms", gpu.num_sms},
                    {"memory_bytes", gpu.memory_bytes},
                    {"shared_bytes_per_block", gpu.shared_bytes_per_block},
                    {"l2_bytes", gpu.l2_bytes}});
  const Json all = {{"version", version()},
                    {"cpu", machine.cpu},
                    {"threads", machine.threads},
                    {"isa", isa},
                    {"gpus", gpus},
                    {"cuda", text_or_null(machine.cuda)},
                    {"cuda_driver", machine.cuda_driver},
                    {"cuda_runtime", machine.cuda_runtime},
                    {"gpu_archs", machine.gpu_archs},
                    {"emulated_archs", machine.emulated_archs}};
  *result = ffi::String(all.dump());
}

void version_text(ffi::PackedArgs, ffi::Any* result) { *result = ffi::String(std::string(version())); }

Op read_op(Arguments& args) {
  const std::string text = args.text("op");
  for (const Op op : kAllOps)
    if (name(op) == text) return op;
  args.fail("ValueError", "op", "the name of an operation, such as decode", '"' + text + '"');
}

CacheFormat read_format(Arguments& args, const char* field) {
  const std::string text = args.text(field);
  if (const auto format = parse_cache_format(text)) return *format;
  args.fail("ValueError", field, format_names(), '"' + text + '"');
}

IndexerFormat read_indexer_format(Arguments& args, const char* field) {
  const std::string text = args.text(field);
  if (const auto format = parse_indexer_format(text)) return *format;
  args.fail("ValueError", field, indexer_format_names(), '"' + text + '"');
}

/// Reads "cpu", "cuda", "cuda:1", "emulated:sm90", or "sm120" for a GPU that need not be there.
void read_device(Arguments& args, Problem& problem) {
  const std::string text = args.text("device");
  if (text == "cpu") return;
  problem.device.type = DeviceType::kCuda;
  constexpr std::string_view kCuda = "cuda", kEmulated = "emulated:", kArch = "sm";
  std::string_view rest = text;
  int32_t* number = nullptr;
  if (rest == kCuda) return;
  if (rest.starts_with(kCuda) && rest[kCuda.size()] == ':') {
    rest.remove_prefix(kCuda.size() + 1);
    number = &problem.device.index;
  } else {
    problem.emulated = rest.starts_with(kEmulated);
    if (problem.emulated) rest.remove_prefix(kEmulated.size());
    if (rest.starts_with(kArch)) {
      rest.remove_prefix(kArch.size());
      number = &problem.gpu_arch;
    }
  }
  const bool digits = number != nullptr && !rest.empty() && rest.size() < 5 &&
                      rest.find_first_not_of("0123456789") == std::string_view::npos;
  if (!digits) args.fail("ValueError", "device", "cpu, cuda:<index>, emulated:sm<arch> or sm<arch>", '"' + text + '"');
  *number = static_cast<int32_t>(std::stoi(std::string(rest)));
}

void explain_problem(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("explain", packed);
  Problem problem{.op = read_op(args)};
  const std::string model_name = args.text("model");
  problem.cache = read_format(args, "cache");
  problem.q_dtype = args.dtype("q_dtype");
  problem.num_heads = args.count("num_heads");
  problem.d_qk = args.count("d_qk");
  problem.d_v = args.count("d_v");
  problem.q_len = args.count("q_len");
  problem.listed_keys = args.count("listed_keys", 0);
  problem.num_requests = args.count("num_requests", 0);
  problem.compute = args.compute("compute");
  problem.indexer_format = read_indexer_format(args, "indexer_format");
  problem.logits_dtype = args.dtype("logits_dtype");
  read_device(args, problem);
  problem.full_build = args.boolean("full_build") && problem.gpu_arch != 0;
  const std::string backend = args.text("backend");
  args.end();
  if (!model_name.empty()) {
    const ModelConfig model = value_of(load_model(model_name));
    const bool up_projected = problem.op == Op::kPrefill;
    problem.num_heads = model.num_attention_heads;
    problem.d_qk = up_projected ? model.prefill_d_qk() : model.d_qk();
    problem.d_v = up_projected ? model.v_head_dim : model.d_v();
  }
  const Explanation found = explain(problem, backend);
  const Json all = {{"selected", text_or_null(found.selected)},
                    {"error", text_or_null(found.error)},
                    {"rows", rows_of(found)},
                    {"code", code_of(found)},
                    {"note", text_or_null(found.note)},
                    {"num_heads", problem.num_heads},
                    {"d_qk", problem.d_qk},
                    {"d_v", problem.d_v}};
  *result = ffi::String(all.dump());
}

void backends(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("backends", packed);
  *result = ffi::String(Json(backend_names(read_op(args))).dump());
}

/// Returns to Python the channels of a row; 0 for a format that leaves them to the shapes.
void row_width_of(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("row_width", packed);
  const KvLayout layout = kv_layout(read_format(args, "format"));
  *result = static_cast<int64_t>(layout.nope_dim + layout.rope_dim);
}

void row_bytes_of(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("row_bytes", packed);
  const CacheFormat format = read_format(args, "format");
  *result = row_bytes(format, args.count("d_qk"));
}

void page_bytes_of(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("page_bytes", packed);
  const CacheFormat format = read_format(args, "format");
  const int32_t d_qk = args.count("d_qk");
  const int32_t page_size = args.count("page_size");
  *result = page_bytes(format, d_qk, page_size, args.boolean("padded"));
}

void indexer_page_bytes_of(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("indexer_page_bytes", packed);
  const int32_t page_size = args.count("page_size");
  *result = indexer_page_bytes(page_size, read_indexer_format(args, "format"));
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("libmla.info", info)
      .def_packed("libmla.version", version_text)
      .def_packed("libmla.explain", explain_problem)
      .def_packed("libmla.backends", backends)
      .def_packed("libmla.row_bytes", row_bytes_of)
      .def_packed("libmla.row_width", row_width_of)
      .def_packed("libmla.page_bytes", page_bytes_of)
      .def_packed("libmla.indexer_page_bytes", indexer_page_bytes_of);
}

}  // namespace
}  // namespace mla::python
