// SPDX-License-Identifier: Apache-2.0
#include "mla/explain_model.h"

#include <algorithm>
#include <vector>

#include "mla/devices.h"
#include "mla/model_steps.h"
#include "mla/problems.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

// Remembers each text once, in order.
void remember(std::vector<std::string>& texts, const std::string& text) {
  if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(text);
}

int64_t parse_tp(const std::string& text, const ModelConfig& model) {
  if (text.empty()) return 1;
  const int64_t tp = parse_int("--tp", text, 1, 65536);
  for (const LayerKind& layer : model.layers)
    if (layer.num_attention_heads % tp != 0)
      throw UsageError("--tp: expected a divisor of {}, the heads of {} ({}), got {}", layer.num_attention_heads,
                       model.name, layer.name, tp);
  return tp;
}

std::string told(const CachePair& caches) {
  if (caches.cache == caches.extra_cache) return std::string(name(caches.cache));
  return fmt::format("{} + {}", name(caches.cache), name(caches.extra_cache));
}

// The caches of a model without a second pool are those of one format.
Json json_of(const CachePair& caches, bool has_pool) {
  return {{"cache", name(caches.cache)}, {"extra_cache", has_pool ? Json(name(caches.extra_cache)) : Json(nullptr)}};
}

Json json_of(const LayerKind& layer, int64_t tp) {
  return {{"name", layer.name},
          {"count", layer.count},
          {"heads", layer.num_attention_heads / tp},
          {"d_qk", layer.d_qk()},
          {"d_v", layer.d_v()},
          {"sliding_window", layer.sliding_window},
          {"compress_ratio", layer.compress_ratio},
          {"index_topk", layer.index_topk},
          {"index_heads", layer.index_heads},
          {"list_width", layer.list_width()},
          {"attn_sink", layer.attn_sink},
          {"draft_block", layer.draft_block}};
}

Json json_of(const Step& step, const Answer& answer) {
  Json json = {{"operation", step.what},
               {"backend", text_or_null(answer.backend)},
               {"reason", text_or_null(answer.reason)},
               {"note", step.note}};
  if (!step.problem) return json;
  const Problem& problem = *step.problem;
  json["problem"] = {{"q_dtype", name(problem.q_dtype)},
                     {"cache", has_cache(problem.op) ? Json(name(problem.cache)) : Json(nullptr)},
                     {"extra_cache", problem.extra_cache ? Json(name(*problem.extra_cache)) : Json(nullptr)},
                     {"heads", problem.num_heads},
                     {"d_qk", problem.d_qk},
                     {"d_v", problem.d_v},
                     {"q_len", problem.q_len}};
  return json;
}

// Work without an operation has in the problem's place what the library lacks for it.
std::string told(const Step& step) {
  if (!step.problem) return step.lacks;
  return describe(*step.problem) + (step.note.empty() ? "" : "; ") + step.note;
}

// What the table does not say.
void print_notes(const ModelConfig& model, const CachePair& caches, bool slow, const Output& output) {
  int32_t attending = 0;
  for (const LayerKind& layer : model.layers) attending += layer.draft_block > 0 ? 0 : layer.count;
  if (attending < model.num_hidden_layers)
    output.print("note: the other {} of {} layers are linear attention, which has no cache of latent rows\n",
                 model.num_hidden_layers - attending, model.num_hidden_layers);
  std::string others;
  for (const CachePair& served : model.caches)
    if (served != caches) others += (others.empty() ? "" : ", ") + told(served);
  if (!others.empty()) output.print("note: also served with {} (--cache)\n", others);
  if (slow) output.print("note: only the float64 reference can run some of it: expect that to be slow\n");
}

}  // namespace

int explain_model(const ModelQuestion& question, const Output& output) {
  output.check_target();
  const ModelConfig model = parse_model("--model", question.model);
  const std::string device = device_of("--device", question.device, true);
  const int64_t tp = parse_tp(question.tp, model);
  check_backend_name("--backend", question.backend);
  const CachePair caches =
      question.cache.empty() ? model.caches.front() : model.caches_of(parse_cache("--cache", question.cache));
  const bool has_pool = std::any_of(model.layers.begin(), model.layers.end(),
                                    [](const LayerKind& layer) { return layer.compress_ratio > 0; });

  Table table({"layers", "operation", "runs on", "problem"}, 4);
  Json layers = Json::array();
  std::vector<std::string> missing, missing_names;
  bool slow = false;
  for (const LayerKind& layer : model.layers) {
    Json json = json_of(layer, tp);
    Json& steps = json["steps"] = Json::array();
    for (const Step& step : steps_of(layer, caches, tp)) {
      const Answer answer = answer_of(step, device, question.backend);
      const bool first = steps.empty();
      table.add_row({first ? fmt::format("{} {}", layer.count, layer.name) : "", step.what,
                     answer.backend.empty() ? "missing" : answer.backend, told(step)});
      steps.push_back(json_of(step, answer));
      if (answer.backend.empty()) {
        // What the library says of its operations begins with their names.
        const std::string operation = step.what + ": ";
        remember(missing, answer.reason.starts_with(operation) ? answer.reason : operation + answer.reason);
        remember(missing_names, step.what);
      }
      slow = slow || (question.backend.empty() && answer.backend == "reference");
    }
    layers.push_back(std::move(json));
  }

  const Explanation on_device = mla::explain(asked_on({}, device));
  const std::string error =
      missing.empty() ? "" : fmt::format("{} on {}: missing: {}", model.name, device, fmt::join(missing, "; "));
  Json served = Json::array();
  for (const CachePair& pair : model.caches) served.push_back(json_of(pair, has_pool));
  output.print("{}: cache {}{}, device {}{}\n\n", model.name, has_pool ? told(caches) : std::string(name(caches.cache)),
               tp == 1 ? "" : fmt::format(", heads divided by {}", tp), device, told_code(on_device));
  table.print(output.text());
  output.print("\n");
  for (const std::string& reason : missing) output.print("missing: {}\n", reason);
  print_notes(model, caches, slow, output);
  output.write_json({{"model", model.name},
                     {"error", text_or_null(error)},
                     {"device", device},
                     {"code", code_json(on_device.code.value_or(GpuCode()))},
                     {"tp", tp},
                     {"caches", json_of(caches, has_pool)},
                     {"served", std::move(served)},
                     {"num_hidden_layers", model.num_hidden_layers},
                     {"layers", std::move(layers)},
                     {"missing", missing}});
  if (missing.size() == 1) throw UsageError("{}", error);
  if (!missing.empty())
    throw UsageError("{} on {}: missing: {} (above is why)", model.name, device, fmt::join(missing_names, ", "));
  return 0;
}

}  // namespace mla::cli
