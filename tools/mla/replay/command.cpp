// SPDX-License-Identifier: Apache-2.0
// Implements `libmla replay`: its options, the loop over steps, and what Ctrl-C does.
#include "mla/command.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "kit/device.h"
#include "mla/bench/ceilings.h"
#include "mla/bench/gpu.h"
#include "mla/device.h"
#include "mla/devices.h"
#include "mla/interrupt.h"
#include "mla/mla.h"
#include "mla/output.h"
#include "mla/processors.h"
#include "mla/renamed_option.h"
#include "mla/replay/budget.h"
#include "mla/replay/engine.h"
#include "mla/replay/layer.h"
#include "mla/replay/pooled_layer.h"
#include "mla/replay/report.h"
#include "mla/replay/scheduler.h"
#include "mla/replay/timeline.h"
#include "mla/replay/trace.h"
#include "mla/shipped.h"
#include "mla/values.h"

namespace mla::cli {
namespace replay {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxTokens = int64_t{1} << 30;

struct Options {
  std::string trace;
  std::string model = "deepseek-v2-lite";
  std::string cache, pool_cache, backend, device, timeline;
  std::string requests = "0", layers = "1", page_size, pool_tokens = "256k", chunk = "4k", max_batch = "64";
  RenamedOption threads{"0"};
  std::string processors, seed = "1", check_every = "16", pool_gb, mtp = "0", dcp = "1", time_budget;
  std::string candidate_blocks = "2048";
  bool as_fast_as_possible = false, sparse = false, shared_prefix = false;
  Output output;
};

template <class T>
T value_or_usage_error(Result<T> result) {
  if (!result.ok()) throw UsageError(result.status().message());
  return std::move(result).value();
}

bool is_real_gpu(std::string_view device) { return device.starts_with("cuda"); }

Context make_context(int32_t threads, const std::string& backend, const std::string& device,
                     const std::vector<int32_t>& affinity = {}) {
  ContextOptions options;
  options.num_threads = threads;
  options.affinity = affinity;
  options.device = device;
  options.backend = backend == "auto" ? "" : backend;
  return value_or_usage_error(Context::create(options));
}

// Samples the ceiling for a short time now and then: on a machine that others use too, it moves. The emulator has none.
class CeilingSampler {
 public:
  CeilingSampler(const std::string& device, int32_t threads, bench::Ceiling prefill, bench::Ceiling decode)
      : prefill_(prefill), decode_(decode) {
    if (device == "cpu") cpu_.emplace(threads);
    if (is_real_gpu(device)) gpu_.emplace(value_or_usage_error(Gpu::open(device)));
    sample();
  }
  void sample_if_due() {
    if (Clock::now() - last_ >= std::chrono::seconds(2)) sample();
  }
  Ceilings medians() {
    if (cpu_) return {.prefill_gflops = cpu_->median(prefill_), .decode_gflops = cpu_->median(decode_)};
    if (!gpu_) return {};
    const double multiply = gpu_->median(bench::GpuCeiling::kMma);
    return {.prefill_gflops = multiply, .decode_gflops = multiply};
  }

 private:
  void sample() {
    if (cpu_) cpu_->sample(prefill_);
    if (cpu_ && decode_ != prefill_) cpu_->sample(decode_);
    if (gpu_) gpu_->sample();
    last_ = Clock::now();
  }
  std::optional<bench::CeilingMeter> cpu_;
  std::optional<bench::GpuMeter> gpu_;
  bench::Ceiling prefill_, decode_;
  Clock::time_point last_;
};

// Shows the progress: on a terminal as a bar, elsewhere as a line now and then.
class ProgressLines {
 public:
  ProgressLines() : progress_("replay"), terminal_(is_terminal(stderr)), next_(Clock::now() + kPeriod) {}

  void update(const Scheduler& scheduler, double now_ms) {
    const auto now = Clock::now();
    if (!terminal_ && now < next_) return;
    if (now >= next_) next_ = now + kPeriod;
    int64_t done = 0, total_tokens = 0;
    for (const Sequence& sequence : scheduler.sequences()) {
      if (sequence.state == SequenceState::kLeftOut) continue;
      total_tokens += int64_t{sequence.request->input_length} + sequence.request->output_length;
      done += std::min(sequence.num_computed, sequence.request->input_length) + sequence.num_output;
    }
    const auto note = fmt::format("{} running, {} waiting, {} finished", scheduler.num_running(),
                                  scheduler.num_queued(now_ms), scheduler.num_finished());
    if (terminal_)
      progress_.update(done, total_tokens, note);
    else
      print_to(stderr, "replay: {} of {} tokens, {}\n", done, total_tokens, note);
  }
  void clear() { progress_.clear(); }

 private:
  static constexpr std::chrono::seconds kPeriod{10};
  Progress progress_;
  bool terminal_;
  Clock::time_point next_;
};

struct Setup {
  EngineOptions engine;
  SchedulerOptions scheduler;
  int32_t threads = 0;
  std::vector<int32_t> affinity;  // as ContextOptions
  int64_t max_requests = 0;
  double time_budget = 0.0;  // seconds; 0 = none
};

int32_t int_option(const char* option, const std::string& text, int64_t min, int64_t max) {
  return static_cast<int32_t>(parse_int(option, text, min, max));
}

// Throws UsageError if rows of the format are not the model's.
void check_cache(const char* option, CacheFormat format, const ModelConfig& model) {
  const KvLayout layout = kv_layout(format);
  const int32_t plain = layout.nope_dim - layout.rotary_in_nope, rotary = layout.rope_dim + layout.rotary_in_nope;
  if (layout.nope_dim != 0 && (model.kv_lora_rank != plain || model.qk_rope_head_dim != rotary))
    throw UsageError("{}: {} holds rows of {} + {} channels, those of {} have {} + {}", option, layout.name, plain,
                     rotary, model.name, model.kv_lora_rank, model.qk_rope_head_dim);
}

// Throws UsageError if the model cannot be replayed with these options.
void check_layer(const Options& options, const LayerOptions& layer) {
  const ModelConfig& model = layer.model;
  if (model.qk_rope_head_dim % 2 != 0)
    throw UsageError("--model: expected an even qk_rope_head_dim, got {}", model.qk_rope_head_dim);
  check_cache("--cache", layer.cache, model);
  if (model.value_is_row) check_cache("--pool-cache", layer.pool_cache, model);
  if (options.sparse && model.index_topk == 0)
    throw UsageError("--sparse: expected a model with index_topk, such as deepseek-v3.2; {} attends to every key",
                     model.name);
  if (options.sparse && layer.world > 1)
    throw UsageError("--dcp: sparse attention runs on one rank here, got {}", layer.world);
  if (layer.shared_prefix && (options.sparse || layer.world > 1))
    throw UsageError("--shared-prefix: expected dense attention of one rank, not {}",
                     options.sparse ? "--sparse" : "--dcp");
  if (options.sparse && model.kv_lora_rank < kIndexerLayout.head_dim)
    throw UsageError("--sparse: expected a kv_lora_rank of at least {}, got {}", kIndexerLayout.head_dim,
                     model.kv_lora_rank);
  const int32_t pooled = options.sparse ? index_pooled(model) : 1;
  if (layer.page_size % pooled != 0)
    throw UsageError("--page-size: expected a multiple of {}, the tokens of a key of {}'s indexer, got {}", pooled,
                     model.name, layer.page_size);
  if (!model.value_is_row) return;
  if (!options.sparse) throw UsageError("--model: the layers of {} are sparse; expected --sparse too", model.name);
  if (channels_per_scale(model) == 0)
    throw UsageError(
        "--model: expected heads of a multiple of 32 channels, which are quantized for the projection, got {}",
        model.d_v());
  for (int32_t unit : PooledLayer::page_units(layer))
    if (layer.page_size % unit != 0)
      throw UsageError("--page-size: expected a multiple of {} for the compressed rows of {}, got {}", unit, model.name,
                       layer.page_size);
}

int64_t cache_bytes(const LayerOptions& layer) {
  return layer.model.value_is_row ? PooledLayer::cache_bytes(layer) : Layer::cache_bytes(layer);
}

LayerOptions make_layer(const Options& options) {
  LayerOptions layer;
  layer.model = parse_model("--model", options.model);
  const bool pooled = layer.model.value_is_row;
  layer.cache = options.cache.empty() ? layer.model.caches.front().cache : parse_cache("--cache", options.cache);
  layer.pool_cache = options.pool_cache.empty() ? layer.model.caches_of(layer.cache).extra_cache
                                                : parse_cache("--pool-cache", options.pool_cache);
  if (!pooled && !options.pool_cache.empty())
    throw UsageError("--pool-cache: expected a model with pools, such as deepseek-v4.1-flash; {} has one cache",
                     layer.model.name);
  if (parse_int("--layers", options.layers, 1) != 1)
    throw UsageError("--layers: expected 1 (a replay computes one attention layer), got {}", options.layers);
  const std::string page_size = options.page_size.empty() ? (pooled ? "256" : "64") : options.page_size;
  layer.page_size = int_option("--page-size", page_size, 1, 1 << 20);
  layer.world = int_option("--dcp", options.dcp, 1, 1024);
  layer.chunk = int_option("--chunk", options.chunk, 1, 1 << 20);
  layer.shared_prefix = options.shared_prefix;
  layer.max_batch = int_option("--max-batch", options.max_batch, 1, 1 << 16);
  layer.drafts = int_option("--mtp", options.mtp, 0, 64);
  layer.candidate_blocks = int_option("--candidate-blocks", options.candidate_blocks, 1, 1 << 20);
  layer.dtype = Projector::activation_dtype();
  if (options.sparse) layer.topk = layer.model.index_topk;
  check_layer(options, layer);
  return layer;
}

Setup make_setup(const Options& options) {
  Setup setup;
  LayerOptions& layer = setup.engine.layer;
  layer = make_layer(options);
  int64_t pool_tokens = parse_int("--pool-tokens", options.pool_tokens, 1, kMaxTokens);
  if (!options.pool_gb.empty()) {
    const double bytes = parse_positive("--pool-gb", "GB", options.pool_gb) * 1e9;
    layer.num_pages = 1;
    const auto pages = static_cast<int64_t>(bytes / static_cast<double>(cache_bytes(layer)));
    pool_tokens = std::min(kMaxTokens, pages * layer.page_tokens());
  }
  layer.num_pages = static_cast<int32_t>(pool_tokens / layer.page_tokens());
  setup.engine.check_every = parse_int("--check-every", options.check_every, 0);
  setup.engine.seed = static_cast<uint64_t>(parse_int("--seed", options.seed, 0));
  const std::vector<int32_t> processors = use_processors("--processors", options.processors);
  setup.threads = static_cast<int32_t>(parse_int(options.threads.where(), options.threads.text(), 0, 4096));
  if (setup.threads == 0) setup.threads = static_cast<int32_t>(processors.size());
  setup.affinity = affinity_of("--processors", processors, setup.threads);
  setup.max_requests = parse_int("--requests", options.requests, 0);
  if (!options.time_budget.empty()) setup.time_budget = parse_positive("--time-budget", "seconds", options.time_budget);
  setup.scheduler = {.page_size = layer.page_tokens(),
                     .num_pages = layer.num_pages,
                     .chunk = layer.chunk,
                     .max_batch = layer.max_batch,
                     .as_fast_as_possible = options.as_fast_as_possible,
                     .drafts = layer.drafts,
                     .seed = setup.engine.seed,
                     .sharers_side_by_side = layer.shared_prefix};
  return setup;
}

// Refuses before anything is allocated what could only fail later.
void check_setup(const Setup& setup, const std::string& device, std::span<const Request> requests) {
  if (const Status status = Scheduler::check(requests, setup.scheduler); !status.ok())
    throw UsageError("{}; raise --pool-tokens", status.message());
  int64_t needed = memory_needed(setup.engine);
  if (is_real_gpu(device)) {
    const LayerOptions& layer = setup.engine.layer;
    const int64_t caches = cache_bytes(layer);
    const int64_t memory = value_or_usage_error(Gpu::open(device)).info().memory_bytes;
    if (memory > 0 && caches > memory)
      throw UsageError("--pool-tokens: expected a cache of at most {}, the memory of {}, got {}",
                       human_bytes(static_cast<double>(memory)), device, human_bytes(static_cast<double>(caches)));
    needed -= caches;
  }
  const int64_t available = bench::available_memory();
  if (available > 0 && needed > available)
    throw UsageError("replay: expected at most {} of memory, need {}; lower --pool-tokens, --chunk or --max-batch",
                     human_bytes(static_cast<double>(available)), human_bytes(static_cast<double>(needed)));
}

std::string selected_backend(Op op, const LayerOptions& layer, int64_t q_len, const std::string& force,
                             const std::string& device) {
  const ModelConfig& model = layer.model;
  const bool up_projected = op == Op::kPrefill;
  const Problem problem{.op = op,
                        .q_dtype = layer.dtype,
                        .cache = layer.cache,
                        .num_heads = model.num_attention_heads,
                        .d_qk = up_projected ? model.prefill_d_qk() : model.d_qk(),
                        .d_v = up_projected ? model.v_head_dim : model.d_v(),
                        .extra_cache = model.value_is_row ? std::optional(layer.pool_cache) : std::nullopt,
                        .q_len = q_len};
  const Explanation explanation = explain(kit::on_device(problem, device), force);
  if (explanation.selected.empty()) throw UsageError(explanation.error);
  return explanation.selected;
}

// Makes the report, with all that it can say before anything ran.
Report make_report(const Setup& setup, const std::string& backend, const std::string& device) {
  const LayerOptions& layer = setup.engine.layer;
  const bool pooled = layer.model.value_is_row;
  Report report;
  report.device = device;
  report.model = layer.model.name;
  report.cache = std::string(name(layer.cache));
  report.sparse = layer.topk > 0;
  report.drafts = setup.engine.layer.drafts;
  report.ranks = layer.world;
  report.shared_prefix = layer.shared_prefix;
  if (pooled) {
    std::vector<std::string> kinds;
    for (const PooledKind& kind : pooled_kinds(layer.model)) kinds.push_back(kind.name);
    report.layers = fmt::format("{} sparse layers ({})", kinds.size(), fmt::join(kinds, ", "));
    report.pool_cache = std::string(name(layer.pool_cache));
    report.other_way = "decode_sparse against prefill_sparse";
  } else if (report.sparse) {
    report.layers = fmt::format("one layer, decode over {} tokens", layer.topk);
  }
  if (report.drafts > 0) report.layers += fmt::format(", {} per answer token", counted(report.drafts, "draft"));
  if (report.shared_prefix) report.layers += ", shared prefixes read once";
  if (report.ranks > 1) report.layers += fmt::format(", {} ranks", report.ranks);
  report.decode_op = report.sparse ? Op::kDecodeSparse : Op::kDecode;
  report.prefill_op = pooled ? report.decode_op : Op::kPrefill;
  report.prefill_backend = selected_backend(report.prefill_op, layer, 1, backend, device);
  report.decode_backend = selected_backend(report.decode_op, layer, report.drafts + 1, backend, device);
  return report;
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs steps until every request is finished or left out, or the user interrupts. Returns the number of steps.
int64_t run_steps(Engine& engine, Scheduler& scheduler, CeilingSampler& ceilings, Timeline* timeline,
                  TimeBudget* budget, Clock::time_point start) {
  ProgressLines progress;
  int64_t steps = 0;
  Recorder& recorder = engine.recorder();
  std::function<bool(const Sequence&)> admits;
  if (budget != nullptr)
    admits = [&](const Sequence& waiting) { return budget->admits(waiting, scheduler, seconds_since(start)); };
  while (!scheduler.done() && !stop_requested) {
    if (budget != nullptr) budget->cut(scheduler, seconds_since(start));
    const double now_ms = recorder.serving_seconds() * 1e3;
    const Step step = scheduler.next(now_ms, admits);
    if (step.empty()) {
      // Nobody has work: the clock jumps to the next arrival, and a little further should rounding fall short of it.
      if (!scheduler.done()) recorder.skip(std::max(scheduler.next_arrival_ms() - now_ms, 1e-6) / 1e3);
      continue;
    }
    recorder.clear_events();
    Work work = work_of(step, scheduler.sequences());
    const int64_t checked = engine.checks().num_checks;
    const Recorder booked = recorder;
    const Clock::time_point begin = Clock::now();
    if (const Status status = engine.run(step, scheduler.sequences()); !status.ok())
      throw std::runtime_error(status.message());
    if (engine.was_cut_short()) break;
    const double end_ms = recorder.serving_seconds() * 1e3;
    scheduler.complete(step, end_ms);
    if (timeline != nullptr) timeline->add_step(steps, step, now_ms, end_ms, recorder.events());
    ++steps;
    ceilings.sample_if_due();
    progress.update(scheduler, end_ms);
    work.amount[Work::kChecks] = static_cast<double>(engine.checks().num_checks - checked);
    if (budget != nullptr)
      budget->observe(work, seconds_by_kind(booked, recorder, seconds_since(begin), !step.prefill.empty()));
  }
  progress.clear();
  return steps;
}

int run_replay(const Options& options) {
  const auto start = Clock::now();
  const InterruptGuard guard;
  options.output.check_target();
  if (!options.timeline.empty()) check_writable("--timeline", options.timeline);
  check_backend_name("--backend", options.backend);
  const std::string device = usable_device("--device", options.device);
  Setup setup = make_setup(options);
  const auto requests = value_or_usage_error(read_trace(shipped(options.trace), setup.max_requests));
  LayerOptions& sized = setup.engine.layer;
  sized.max_batch = static_cast<int32_t>(std::min<int64_t>(sized.max_batch, std::ssize(requests)));
  for (const Request& request : requests)
    sized.max_positions = std::max(sized.max_positions, request.input_length + request.output_length);
  check_setup(setup, device, requests);
  if (std::ssize(requests) < setup.max_requests)
    print_to(stderr, "libmla: --requests {}: the trace has only {}\n", setup.max_requests,
             counted(std::ssize(requests), "request"));
  if (kBlockTokens % setup.scheduler.page_size != 0)
    print_to(stderr, "libmla: pages of {} tokens do not divide the trace's blocks of {}: no prefix is shared\n",
             setup.scheduler.page_size, kBlockTokens);

  const LayerOptions& layer = setup.engine.layer;
  Report report = make_report(setup, options.backend, device);
  const Context context = make_context(setup.threads, options.backend, device, setup.affinity);
  const Context reference = make_context(1, "reference", "cpu");
  report.threads = context.num_threads();

  Scheduler scheduler(requests, setup.scheduler);
  const std::unique_ptr<Engine> engine = make_engine(setup.engine, context, reference, stop_requested);
  const bool bf16 = layer.dtype == DType::kBF16;
  // Quantized elements are bf16 once they are read.
  const bool bf16_rows = bf16 && value_dtype(kv_layout(layer.cache).nope.element) == DType::kBF16;
  CeilingSampler ceilings(device, context.num_threads(), bench::arithmetic_ceiling(report.prefill_backend, bf16),
                          bench::arithmetic_ceiling(report.decode_backend, bf16_rows));
  const std::unique_ptr<Timeline> timeline =
      options.timeline.empty() ? nullptr : std::make_unique<Timeline>(options.timeline);
  std::optional<TimeBudget> budget;
  if (setup.time_budget > 0.0) budget.emplace(setup.time_budget, setup.scheduler, setup.engine.check_every);
  report.steps = run_steps(*engine, scheduler, ceilings, timeline.get(), budget ? &*budget : nullptr, start);

  report.interrupted = !scheduler.done();
  report.wall_seconds = seconds_since(start);
  report.time_budget = setup.time_budget;
  report.collect(scheduler, engine->recorder(), engine->checks(), ceilings.medians());
  if (timeline != nullptr) timeline->finish(scheduler.sequences(), engine->recorder().serving_seconds() * 1e3);
  options.output.write_json(report.to_json());
  report.print(options.output);
  if (engine->checks().failed()) return 1;
  return report.interrupted ? kExitInterrupted : 0;
}

}  // namespace
}  // namespace replay

Action add_replay(CLI::App& app) {
  auto options = std::make_shared<replay::Options>();
  CLI::App* command = app.add_subcommand("replay", "Serve a request trace through one attention layer");
  command->footer(
      "Examples:\n"
      "  libmla replay data/mooncake_conversation_sample.jsonl --requests 16 --time-budget 60\n"
      "  libmla replay trace.jsonl --model deepseek-v3 --chunk 2k --timeline replay.json\n"
      "  libmla replay trace.jsonl --model deepseek-v3.2 --sparse --cache fp8_ds_mla --mtp 1 --requests 2\n"
      "  libmla replay trace.jsonl --model deepseek-v4.1-flash --sparse --requests 2\n"
      "  libmla replay trace.jsonl --cache fp8 --dcp 4 --requests 4 --as-fast-as-possible --json=result.json\n"
      "  libmla replay trace.jsonl --device cuda --model deepseek-v3 --pool-gb 40\n"
      "  libmla replay short.jsonl --device emulated:sm120 --requests 1 --chunk 128\n"
      "Exit status: 0 done, 1 a checked result is wrong, 2 unusable input, 130 interrupted (the report covers what was "
      "done).");
  command->add_option("trace", options->trace, "Request trace, one JSON object a line (format: data/README.md)")
      ->required();
  command->add_option("--model", options->model, "Preset, config.json or its folder")->capture_default_str();
  command->add_option("--requests", options->requests, "Replay the first N lines; 0 = all")->capture_default_str();
  command->add_option("--time-budget", options->time_budget,
                      "Seconds after which to be done: leaves out requests that would take longer (default: none)");
  command->add_option("--layers", options->layers, "Layers that are computed; only 1")->capture_default_str();
  command->add_option("--cache", options->cache, "Cache format (default: the model's, bf16 or V4's, V4.1's)");
  command->add_option("--pool-cache", options->pool_cache,
                      "Format of the compressed pools (deepseek-v4.1-flash: fp4_dsv41; else as --cache)");
  command->add_flag(
      "--sparse", options->sparse,
      "Sparse attention: indexer and decode_sparse (deepseek-v3.2, glm-5, glm-5.3-flash, deepseek-v4-flash, "
      "-v4.1-flash)");
  command
      ->add_option("--candidate-blocks", options->candidate_blocks,
                   "Blocks of 8 keys that V4.1's first indexer over a pool picks for the later ones")
      ->capture_default_str();
  command->add_flag("--shared-prefix", options->shared_prefix,
                    "Decode reads rows that several requests share once (decode's shared_prefix)");
  command->add_option("--mtp", options->mtp, "Drafts computed beside each answer token (speculative decoding)")
      ->capture_default_str();
  command->add_option("--dcp", options->dcp, "Ranks that share each request's tokens (decode context parallelism)")
      ->capture_default_str();
  command->add_option("--page-size", options->page_size,
                      "Tokens of a page (64; V4, V4.1: 256); prefixes are shared if it divides 512");
  CLI::Option* pool_tokens =
      command->add_option("--pool-tokens", options->pool_tokens, "Tokens that the cache holds")->capture_default_str();
  command->add_option("--pool-gb", options->pool_gb, "Size of the cache in GB (10^9 bytes)")->excludes(pool_tokens);
  command->add_option("--chunk", options->chunk, "Prompt tokens computed per step")->capture_default_str();
  command->add_option("--max-batch", options->max_batch, "Requests that run at once")->capture_default_str();
  options->threads.add(*command, "--num-threads", "--threads", "Threads; 0 = all that the process may use")
      ->capture_default_str();
  command->add_option("--processors", options->processors, kProcessorsHelp)->option_text("LIST");
  command->add_option("--backend", options->backend, "Backend or family to force");
  command->add_option("--device", options->device,
                      "cpu, cuda[:N] or emulated:sm90, which is slow (else MLA_EMULATE, else cpu)");
  command->add_option("--seed", options->seed, "Seed of weights and activations")->capture_default_str();
  command->add_option("--check-every", options->check_every, "Steps between two checked samples; 0 = no checks")
      ->capture_default_str();
  command->add_flag("--as-fast-as-possible", options->as_fast_as_possible,
                    "All requests arrive at once instead of at their times");
  command->add_option("--timeline", options->timeline, "Write a Chrome trace to FILE");
  options->output.add_option(*command);
  return [options] { return replay::run_replay(*options); };
}

}  // namespace mla::cli
