// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/report.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "mla/backend.h"
#include "mla/devices.h"
#include "mla/values.h"

namespace mla::bench {
namespace {

using cli::Json;

// What the caches or tensors of a case are made of.
std::string data_format(const Case& one) {
  switch (one.op) {
    case Op::kAppendIndexer:
    case Op::kIndexerLogits:
    case Op::kIndexerTopK: return "indexer";
    case Op::kTopK: return "f32";
    case Op::kCompress:
      if (one.compress_to == kit::CompressSpec::To::kIndexer) return "indexer";
      if (one.compress_to == kit::CompressSpec::To::kLatents) return "bf16";
      return std::string(name(one.cache));
    case Op::kBlockTableToCsr:
    case Op::kPhysicalSlots: return "i32";
    default: return std::string(cli::has_cache(one.op) ? name(one.cache) : name(one.q_dtype));
  }
}

std::string_view name(Scales scales) {
  switch (scales) {
    case Scales::kPowersOfTwo: return "pow2";
    case Scales::kF32: return "f32";
    case Scales::kPerSlot: return "per-slot";
  }
  return {};
}

std::string_view name(kit::CompressSpec::To to) {
  using To = kit::CompressSpec::To;
  return to == To::kCache ? "cache" : to == To::kIndexer ? "indexer" : "latents";
}

std::string_view name(kit::FinishSpec::Gate gate) {
  using Gate = kit::FinishSpec::Gate;
  return gate == Gate::kNone ? "none" : gate == Gate::kHead ? "head" : "channel";
}

std::string_view name(kit::Tree tree) {
  return tree == kit::Tree::kNone ? "none" : tree == kit::Tree::kMask ? "mask" : "parents";
}

// Indices of a query, in all pools.
int64_t indices_of(const Case& one) { return one.topk + one.extra_topk; }

// What makes a case other than the usual one of its shape, for people.
std::string variant_text(const Case& one) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (one.scales != Scales::kPowersOfTwo) add(fmt::format("{} scales", name(one.scales)));
  if (one.op != Op::kCompress && one.ratio > 1)
    add(fmt::format("groups of {}{}", one.ratio, one.list_tokens ? ", all tokens" : ""));
  if (one.blocks > 0 || one.block_size > 1)
    add(fmt::format("{}blocks of {}", one.blocks > 0 ? fmt::format("{} ", one.blocks) : "", one.block_size));
  if (one.op == Op::kCompress)
    add(fmt::format("groups of {}{}, tokens {}", one.ratio, one.overlap ? " with overlap" : "",
                    mla::name(one.q_dtype)));
  if (one.append) add(fmt::format("keys appended to {}", mla::name(*one.append)));
  if (one.norm) add("normalized");
  if (one.finishes)
    add(fmt::format("{}{}", one.op == Op::kFinishOutput ? "to " : "finished as ", mla::name(one.out_dtype)));
  if (one.gate != kit::FinishSpec::Gate::kNone) add(fmt::format("a gate of each {}", name(one.gate)));
  if (one.indexer_format != IndexerFormat::kFP8) add(fmt::format("{} keys", name(one.indexer_format)));
  if (one.logits_dtype != DType::kF32) add(fmt::format("{} logits", mla::name(one.logits_dtype)));
  if (one.op == Op::kCopyPages) add(fmt::format("to {}, pages of {}", name(one.to_cache), one.to_page_size));
  if (one.extra_topk > 0)
    add(fmt::format("{} + {} keys, second {}pages of {}", one.topk, one.extra_topk,
                    one.extra_cache != one.cache ? fmt::format("pool {}, ", name(one.extra_cache)) : "",
                    one.extra_page_size));
  const bool absorbed = one.op == Op::kDecode || one.op == Op::kDecodeSparse;  // others have a column for the type
  if (one.q_dtype == DType::kE4M3 && absorbed) add("e4m3 queries");
  if (one.sink) add("sink");
  if (one.window >= 0) add(fmt::format("window {}", one.window));
  if (one.soft_cap > 0.0) add(fmt::format("cap {:g}", one.soft_cap));
  if (one.alibi) add("alibi");
  if (one.compute != Compute::kDefault) add(fmt::format("compute {}", name(one.compute)));
  if (one.tree != kit::Tree::kNone) add(fmt::format("tree {}", name(one.tree)));
  if (one.dcp > 1) add(fmt::format("rank 0 of {}", one.dcp));
  if (one.prefix > 0) add(fmt::format("prefix of {}{}", one.prefix, one.shared_prefix ? " read once" : ""));
  return text;
}

int64_t mean_of(int64_t total, size_t count) {
  return count == 0 ? 0 : (total + static_cast<int64_t>(count) / 2) / static_cast<int64_t>(count);
}

int64_t q_len_of(const Case& one) {
  int64_t longest = 0;
  for (const Request& request : one.requests) longest = std::max(longest, request.q_len);
  return longest;
}

std::string kv_text(const Case& one) {
  return (one.ragged() ? "~" : "") + std::to_string(mean_of(one.total_kv(), one.requests.size()));
}

std::string lengths_text(const Case& one) { return one.lengths == "uniform" ? "" : one.lengths; }

std::string topk_text(const Case& one) { return indices_of(one) > 0 ? std::to_string(indices_of(one)) : "-"; }
std::string heads_text(const Case& one) { return cli::has_heads(one.op) ? std::to_string(one.heads) : "-"; }
std::string page_text(const Case& one) { return cli::has_pages(one.op) ? std::to_string(one.page_size) : "-"; }

std::string backend_text(const Case& one) { return one.backend.empty() ? "auto" : one.backend; }

std::string device_text(const Case& one) { return one.device.empty() ? cli::device_of("--device", "") : one.device; }

// What a listed case and a result begin with.
Json shape_json(const Case& one, const std::string& backend) {
  return {{"op", name(one.op)},
          {"backend", backend},
          {"device", device_text(one)},
          {"cache", data_format(one)},
          {"batch", one.requests.size()},
          {"q_len", q_len_of(one)},
          {"kv_len", mean_of(one.total_kv(), one.requests.size())},
          {"heads", one.heads},
          {"page_size", one.page_size},
          {"topk", indices_of(one)},
          {"threads", one.threads}};
}

// The rest of a case.
void add_details(const Case& one, Json& json) {
  json["label"] = one.label;
  json["lengths"] = one.lengths;
  json["kv_total"] = one.total_kv();
  json["q_dtype"] = name(one.q_dtype);
  json["d_qk"] = one.d_qk;
  json["d_v"] = one.d_v;
  json["causal"] = one.causal;
  json["batch_invariant"] = one.batch_invariant;
  json["prefix"] = one.prefix;
  json["shared_prefix"] = one.shared_prefix;
  json["states"] = one.op == Op::kMergeStates ? one.states : 0;
  const bool two_pools = one.extra_topk > 0, copies = one.op == Op::kCopyPages;
  json["scales"] = name(one.scales);
  json["extra_topk"] = one.extra_topk;
  json["extra_page_size"] = two_pools ? one.extra_page_size : 0;
  json["extra_cache"] = two_pools ? Json(name(one.extra_cache)) : Json(nullptr);
  json["to_cache"] = copies ? Json(name(one.to_cache)) : Json(nullptr);
  json["to_page_size"] = copies ? one.to_page_size : 0;
  const bool compresses = one.op == Op::kCompress;
  json["group_tokens"] = one.ratio;
  json["list_tokens"] = one.list_tokens;
  json["blocks"] = one.blocks;
  json["block_size"] = one.block_size;
  json["overlap"] = compresses && one.overlap;
  json["compress_to"] = compresses ? Json(name(one.compress_to)) : Json(nullptr);
  json["append"] = one.append ? Json(mla::name(*one.append)) : Json(nullptr);
  json["norm"] = one.norm;
  json["out_dtype"] = one.finishes ? Json(mla::name(one.out_dtype)) : Json(nullptr);
  json["gate"] = name(one.gate);
  json["indexer_format"] = name(one.indexer_format);
  json["logits_dtype"] = mla::name(one.logits_dtype);
  json["sink"] = one.sink;
  json["window"] = one.window;
  json["soft_cap"] = one.soft_cap;
  json["alibi"] = one.alibi;
  json["compute"] = name(one.compute);
  json["tree"] = name(one.tree);
  json["dcp"] = one.dcp;
}

// Microseconds to the nanosecond: what the clock resolves.
double microseconds(double seconds) { return std::round(seconds * 1e9) / 1e3; }

}  // namespace

Json machine_json() {
  const MachineInfo& machine = machine_info();
  Json isa = Json::array();
  for (const IsaLevel& level : machine.isa)
    if (level.cpu_has && level.os_allows && level.built) isa.push_back(level.name);
  Json gpus = Json::array();
  for (const GpuInfo& gpu : machine.gpus) gpus.push_back(gpu.name);
  return {{"cpu", machine.cpu},
          {"threads", machine.threads},
          {"isa", isa},
          {"gpus", gpus},
          {"bf16_instruction", ceiling_kernels().bf16_name},
          {"f32_instruction", ceiling_kernels().f32_name}};
}

Json ceilings_json(CeilingMeter* meter, const Meters& meters) {
  const auto median = [&](Ceiling ceiling) { return meter == nullptr ? Json(nullptr) : Json(meter->median(ceiling)); };
  Json gpus = Json::array();
  for (const auto& [device, gpu] : meters.gpus()) {
    const double wgmma = gpu->median(GpuCeiling::kWgmma), e4m3 = gpu->median(GpuCeiling::kMmaE4M3);
    gpus.push_back({{"device", device},
                    {"read_gbps", gpu->median(GpuCeiling::kRead)},
                    {"copy_gbps", gpu->median(GpuCeiling::kCopy)},
                    {"mma_bf16_gflops", gpu->median(GpuCeiling::kMma)},
                    {"mma_e4m3_gflops", e4m3 > 0.0 ? Json(e4m3) : Json(nullptr)},
                    {"mma_e4m3_converted", e4m3 > 0.0 && converts_e4m3(gpu->gpu())},
                    {"wgmma_bf16_gflops", wgmma > 0.0 ? Json(wgmma) : Json(nullptr)}});
  }
  return {{"amx_gflops", ceiling_kernels().tiles != nullptr ? median(Ceiling::kTiles) : Json(nullptr)},
          {"bf16_gflops", median(Ceiling::kBf16)},
          {"f32_gflops", median(Ceiling::kF32)},
          {"dram_gbps", median(Ceiling::kDram)},
          {"l3_gbps", median(Ceiling::kL3)},
          {"f32_avx2_gflops", median(Ceiling::kF32Avx2)},
          {"threads", meter == nullptr ? Json(nullptr) : Json(meter->threads())},
          {"gpus", gpus}};
}

void print_ceilings(CeilingMeter* meter, const Meters& meters, std::FILE* file) {
  if (meter != nullptr)
    cli::print_to(file,
                  "ceilings, {} thread{}: {}bf16 {:.0f} GFLOP/s ({}), f32 {:.0f} GFLOP/s ({}), DRAM read {:.1f} GB/s, "
                  "L3 read {:.1f} GB/s\n",
                  meter->threads(), meter->threads() == 1 ? "" : "s",
                  ceiling_kernels().tiles != nullptr
                      ? fmt::format("AMX {:.0f} GFLOP/s (tdpbf16ps), ", meter->median(Ceiling::kTiles))
                      : "",
                  meter->median(Ceiling::kBf16), ceiling_kernels().bf16_name, meter->median(Ceiling::kF32),
                  ceiling_kernels().f32_name, meter->median(Ceiling::kDram), meter->median(Ceiling::kL3));
  for (const auto& [device, gpu] : meters.gpus()) {
    const GpuInfo& info = gpu->gpu().info();
    const double wgmma = gpu->median(GpuCeiling::kWgmma), e4m3 = gpu->median(GpuCeiling::kMmaE4M3);
    const std::string_view remark = converts_e4m3(gpu->gpu()) ? " (ptxas converts to f16)" : "";
    cli::print_to(file, "ceilings, {} ({}): read {:.0f} GB/s, copy {:.0f} GB/s, mma.sync bf16 {:.1f} TFLOP/s{}{}\n",
                  device, info.name, gpu->median(GpuCeiling::kRead), gpu->median(GpuCeiling::kCopy),
                  gpu->median(GpuCeiling::kMma) * 1e-3,
                  e4m3 > 0.0 ? fmt::format(", mma.sync e4m3 {:.1f} TFLOP/s{}", e4m3 * 1e-3, remark) : "",
                  wgmma > 0.0 ? fmt::format(", wgmma bf16 {:.1f} TFLOP/s", wgmma * 1e-3) : "");
  }
}

namespace {

Json tile_runs_json(const std::optional<TileRuns>& runs) {
  if (!runs) return nullptr;
  return {{"runs", runs->runs}, {"median_us", microseconds(runs->median_s)}, {"loaded_gflops", runs->loaded_gflops}};
}

}  // namespace

Json result_json(const Measurement& m) {
  const Case& one = m.description;
  Json json = shape_json(one, m.backend);
  json["median_us"] = microseconds(m.median_s);
  json["p10_us"] = microseconds(m.p10_s);
  json["p90_us"] = microseconds(m.p90_s);
  json["gflops"] = m.gflops;
  json["gbps"] = m.gbps;
  json["ceiling_share"] = m.ceiling_share ? Json(*m.ceiling_share) : Json(nullptr);
  json["error"] = m.error ? Json(*m.error) : Json(nullptr);
  json["error_text"] = m.error_text;
  json["method_error"] = m.method_error ? Json(*m.method_error) : Json(nullptr);
  add_details(one, json);
  json["runs"] = m.runs;
  json["ceiling_kind"] = m.ceiling_kind;
  json["ceiling"] = m.ceiling;
  json["noisy"] = m.noisy();
  json["amx_alone"] = tile_runs_json(m.alone);
  json["amx_shared"] = tile_runs_json(m.shared);
  json["plan_us"] = m.plan_s ? Json(microseconds(*m.plan_s)) : Json(nullptr);
  json["copies"] = m.copies;
  json["ratio"] = m.ratio ? Json(*m.ratio) : Json(nullptr);
  json["target"] = m.target.empty() ? Json(nullptr) : Json(m.target);
  json["met"] = m.met ? Json(*m.met) : Json(nullptr);
  return json;
}

std::string share_text(const Measurement& m) {
  return m.ceiling_share ? cli::human_percent(*m.ceiling_share) + (m.noisy() ? "*" : "") : "-";
}

namespace {

std::string tile_runs_text(const std::optional<TileRuns>& runs) {
  return runs ? fmt::format("{} ({})", cli::human_seconds(runs->median_s), runs->runs) : "-";
}

}  // namespace

std::string summary_line(const Measurement& m) {
  const Case& one = m.description;
  return fmt::format("{}{} on {}: {} heads, batch {}, q_len {}, kv_len {}: {}{}{}",
                     one.label.empty() ? "" : one.label + ": ", name(one.op), m.backend, one.heads, one.requests.size(),
                     q_len_of(one), kv_text(one), cli::human_seconds(m.median_s),
                     m.ceiling_kind.empty() ? "" : fmt::format(", {} of {}", share_text(m), m.ceiling_kind),
                     m.error_text.empty() ? "" : ", WRONG");
}

Json cases_json(const std::vector<CaseGroup>& groups) {
  Json cases = Json::array();
  for (size_t i = 0; i < groups.size(); ++i)
    for (const Case& one : groups[i].cases) {
      Json json = shape_json(one, backend_text(one));
      add_details(one, json);
      json["group"] = i;
      json["memory_bytes"] = memory_needed(one);
      cases.push_back(std::move(json));
    }
  return cases;
}

void print_cases(const std::vector<CaseGroup>& groups, std::FILE* file) {
  cli::Table table({"case", "op", "cache", "variant", "lengths", "backend", "device", "heads", "batch", "q_len",
                    "kv_len", "topk", "page", "threads", "memory"},
                   7);
  int64_t count = 0;
  for (const CaseGroup& group : groups)
    for (const Case& one : group.cases) {
      table.add_row({one.label.empty() ? "-" : one.label, std::string(name(one.op)), data_format(one),
                     variant_text(one), one.lengths, backend_text(one), device_text(one), heads_text(one),
                     std::to_string(one.requests.size()), std::to_string(q_len_of(one)), kv_text(one), topk_text(one),
                     page_text(one), std::to_string(one.threads),
                     cli::human_bytes(static_cast<double>(memory_needed(one)))});
      ++count;
    }
  table.print(file);
  cli::print_to(file, "{}\n", cli::counted(count, "case"));
}

void print_table(const std::vector<Measurement>& results, std::FILE* file) {
  const auto any = [&](auto&& predicate) { return std::any_of(results.begin(), results.end(), predicate); };
  const bool labels = any([](const Measurement& m) { return !m.description.label.empty(); });
  const bool lengths = any([](const Measurement& m) { return !lengths_text(m.description).empty(); });
  const bool variants = any([](const Measurement& m) { return !variant_text(m.description).empty(); });
  const bool gpu = any([](const Measurement& m) { return m.description.device != "cpu"; });
  const bool plans = any([](const Measurement& m) { return m.plan_s.has_value(); });
  const bool tiles = any([](const Measurement& m) { return m.alone || m.shared; });
  const bool topk = any([](const Measurement& m) { return indices_of(m.description) > 0; });
  const bool errors = any([](const Measurement& m) { return m.error.has_value(); });
  const bool ratios = any([](const Measurement& m) { return m.ratio.has_value(); });
  const bool targets = any([](const Measurement& m) { return !m.target.empty(); });
  std::vector<std::string> header;
  if (labels) header.push_back("case");
  header.insert(header.end(), {"op", "backend", "cache"});
  if (variants) header.push_back("variant");
  if (lengths) header.push_back("lengths");
  const size_t left = header.size();
  header.insert(header.end(), {"heads", "batch", "q_len", "kv_len"});
  if (topk) header.push_back("topk");
  header.push_back("page");
  header.push_back(gpu ? "device" : "thr");
  header.insert(header.end(), {"median", "p10", "p90", "GFLOP/s", "GB/s", "share", "of"});
  if (tiles) header.insert(header.end(), {"core alone", "core shared"});
  if (plans) header.push_back("plan");
  if (ratios) header.push_back("ratio");
  if (errors) header.push_back("error");
  if (targets) header.insert(header.end(), {"target", "met"});
  cli::Table table(header, left);
  for (const Measurement& m : results) {
    const Case& one = m.description;
    std::vector<std::string> row;
    if (labels) row.push_back(one.label);
    row.insert(row.end(), {std::string(name(one.op)), m.backend, data_format(one)});
    if (variants) row.push_back(variant_text(one));
    if (lengths) row.push_back(lengths_text(one));
    row.insert(row.end(),
               {heads_text(one), std::to_string(one.requests.size()), std::to_string(q_len_of(one)), kv_text(one)});
    if (topk) row.push_back(topk_text(one));
    row.push_back(page_text(one));
    row.push_back(!gpu                  ? std::to_string(one.threads)
                  : one.device == "cpu" ? fmt::format("cpu {}", one.threads)
                                        : one.device);
    row.insert(row.end(), {cli::human_seconds(m.median_s), cli::human_seconds(m.p10_s), cli::human_seconds(m.p90_s),
                           m.gflops > 0 ? fmt::format("{:.1f}", m.gflops) : "-", fmt::format("{:.1f}", m.gbps),
                           share_text(m), m.ceiling_kind});
    if (tiles) row.insert(row.end(), {tile_runs_text(m.alone), tile_runs_text(m.shared)});
    if (plans) row.push_back(m.plan_s ? cli::human_seconds(*m.plan_s) : "");
    if (ratios) row.push_back(m.ratio ? cli::human_percent(*m.ratio) : "");
    if (errors) row.push_back(m.error ? fmt::format("{:.1e}{}", *m.error, m.error_text.empty() ? "" : " BAD") : "");
    if (targets) row.insert(row.end(), {m.target, m.met ? (*m.met ? "yes" : "NO") : ""});
    table.add_row(std::move(row));
  }
  table.print(file);
  if (tiles)
    cli::print_to(file,
                  "core alone, shared: medians of the runs (how many) beside which tiles of AMX were loaded at full "
                  "speed, or at a fourth of it\n");
  if (any([](const Measurement& m) { return m.noisy(); })) cli::print_to(file, "* {}\n", kNoisyRemark);
}

void write_csv(const std::vector<Measurement>& results, const std::string& path) {
  std::FILE* file = path == "-" ? stdout : std::fopen(path.c_str(), "w");
  if (file == nullptr) throw cli::UsageError("--csv: cannot open '{}': {}", path, std::strerror(errno));
  std::vector<std::string> header;
  const Json keys = result_json(Measurement{});
  for (const auto& item : keys.items()) header.push_back(item.key());
  cli::Table table(header);
  for (const Measurement& m : results) {
    std::vector<std::string> row;
    const Json json = result_json(m);
    for (const Json& value : json)
      row.push_back(value.is_string() ? value.get<std::string>() : value.is_null() ? "" : value.dump());
    table.add_row(std::move(row));
  }
  table.print_csv(file);
  bool ok = std::fflush(file) == 0 && std::ferror(file) == 0;
  if (file != stdout) ok = std::fclose(file) == 0 && ok;
  if (!ok) throw cli::UsageError("--csv: cannot write '{}'", path);
}

}  // namespace mla::bench
