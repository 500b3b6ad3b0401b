#include "adapters/merge_plan.h"

#include <algorithm>
#include <cmath>

#include "adapters/delta.h"
#include "adapters/entry.h"
#include "adapters/made_tensor.h"
#include "adapters/numbers.h"
#include "adapters/peft_config.h"
#include "adapters/rows.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

std::string shape_of(const TensorEntry& t) { return shape_words({t.shape.begin(), t.shape.end()}); }

Status refuse(StatusCode code, const SafetensorsReader& file, const TensorEntry& tensor,
              const std::string& what) {
  return Status(code, file.path() + ": " + std::string(tensor.name) + " " + what);
}

Status check_finite(const AdapterEntry& entry) {
  for (const AdapterTensor& t : entry.tensors) {
    const int64_t count = t.numel();
    constexpr int64_t kBlock = 4096;
    std::vector<float> values(static_cast<size_t>(std::min(count, kBlock)));
    const int64_t size = file_dtype_bits(t.dtype) / 8;
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t n = std::min(kBlock, count - i);
      if (!widen_elements(t.dtype, static_cast<const char*>(t.data) + i * size, n, values.data()))
        return Status(StatusCode::kUnsupportedDtype,
                      t.key + " is " + file_dtype_name(t.dtype) + ", expected a type of numbers");
      // the sum of zeros times the values is zero where all are finite
      float sum = 0;
      for (int64_t k = 0; k < n; ++k) sum += values[static_cast<size_t>(k)] * 0.0F;
      if (sum != 0.0F)
        return Status(StatusCode::kInvalidArgument,
                      (t.key.empty() ? entry.path : t.key) +
                          " holds a NaN or an infinity, expected finite numbers");
    }
  }
  return Status();
}

Status transpose(const AdapterTensor& t, Role role, AdapterTensor* result) {
  char* to = nullptr;
  LORAACCEL_RETURN_IF_ERROR(make_tensor(role, t.dtype, {t.shape[1], t.shape[0]}, result, &to));
  result->key = t.key;
  const int64_t size = file_dtype_bits(t.dtype) / 8;
  const char* from = static_cast<const char*>(t.data);
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    for (int64_t j = 0; j < t.shape[1]; ++j)
      std::copy_n(from + (i * t.shape[1] + j) * size, size, to + (j * t.shape[0] + i) * size);
  }
  return Status();
}

// The adapter of W^T: (B A)^T = A^T B^T.
Status turn(const AdapterEntry& entry, AdapterEntry* turned) {
  *turned = entry;
  if (entry.kind != AdapterKind::kLora || entry.tensors.size() < 2 ||
      entry.find(Role::kDoraScale) != nullptr)
    return Status(StatusCode::kInvalidArgument,
                  entry.path + ": only plain LoRA is merged into weights stored as [in, out]");
  AdapterTensor up;
  AdapterTensor down;
  LORAACCEL_RETURN_IF_ERROR(transpose(*entry.find(Role::kDown), Role::kUp, &up));
  LORAACCEL_RETURN_IF_ERROR(transpose(*entry.find(Role::kUp), Role::kDown, &down));
  turned->tensors = {up, down};
  turned->native_rows = entry.native_rows == 0 ? 0 : up.shape[0];
  return Status();
}

bool has_weight(const AdapterEntry& e) {
  switch (e.kind) {
    case AdapterKind::kFull:
      return e.find(Role::kDiff) != nullptr;
    case AdapterKind::kNorm:
      return e.find(Role::kNormWeight) != nullptr;
    case AdapterKind::kReplace:
      return e.find(Role::kWeight) != nullptr;
    default:
      return true;
  }
}

// The entry's tensors for the layer's bias.
std::vector<Role> bias_roles(const AdapterEntry& e) {
  std::vector<Role> roles;
  for (const Role role : {Role::kDiffBias, Role::kNormBias, Role::kUpBias, Role::kBias}) {
    if (e.find(role) != nullptr) roles.push_back(role);
  }
  return roles;
}

bool mergeable(AdapterKind kind) {
  return kind != AdapterKind::kIa3 && kind != AdapterKind::kOft && kind != AdapterKind::kGlora;
}

bool is_quantised(FileDType dtype) { return !is_float_dtype(dtype); }

}  // namespace

Status MergePlan::prepare(std::span<const AdapterToMerge> adapters) {
  if (adapters.empty()) return Status(StatusCode::kInvalidArgument, "there is no adapter to merge");
  const std::string& base = adapters[0].adapter->base;
  table_ = base.empty() ? nullptr : find_name_table(base);
  size_t count = 0;
  for (const AdapterToMerge& a : adapters) count += a.adapter->entries.size();
  turned_.reserve(count);
  for (const AdapterToMerge& a : adapters) {
    if (a.adapter->base != base)
      return Status(StatusCode::kInvalidArgument, "an adapter of " + base + " and one of " +
                                                      a.adapter->base +
                                                      " cannot be merged into one model");
    if (!std::isfinite(a.strength))
      return Status(StatusCode::kInvalidArgument,
                    "a strength of " + number_text(a.strength) + ", expected a number");
    PeftConfig config;
    if (a.adapter->format == "peft" && !a.adapter->config.empty())
      LORAACCEL_RETURN_IF_ERROR(
          parse_peft_config("adapter_config.json", a.adapter->config, &config));
    for (const AdapterEntry& entry : a.adapter->entries) {
      if (!mergeable(entry.kind))
        return Status(StatusCode::kInvalidArgument, entry.path + ": an adapter of kind " +
                                                        adapter_kind_name(entry.kind) +
                                                        " cannot be merged");
      if (entry.kind == AdapterKind::kReplace && a.strength != 1)
        return Status(StatusCode::kInvalidArgument,
                      entry.path +
                          ": a weight that replaces the model's has no "
                          "strength but 1, found " +
                          number_text(a.strength));
      LORAACCEL_RETURN_IF_ERROR(check_finite(entry));
      const AdapterEntry* use = &entry;
      if (config.fan_in_fan_out && entry.kind == AdapterKind::kLora) {
        turned_.emplace_back();
        LORAACCEL_RETURN_IF_ERROR(turn(entry, &turned_.back()));
        use = &turned_.back();
      }
      const std::string component = table_ == nullptr ? "" : entry.component;
      by_layer_[{component, entry.path}].push_back(items_.size());
      items_.push_back({use, a.strength});
    }
  }
  return Status();
}

bool MergePlan::find_target(std::string_view key, const std::string& component, int64_t rows,
                            Target* target) const {
  std::string_view stem = key;
  target->bias = false;
  if (stem.ends_with(".weight")) {
    stem.remove_suffix(7);
  } else if (stem.ends_with(".bias")) {
    stem.remove_suffix(5);
    target->bias = true;
  } else if (stem.ends_with(".scale")) {
    stem.remove_suffix(6);
  }
  target->path = stem;
  if (table_ == nullptr) return by_layer_.contains({"", target->path});
  bool found = false;
  for (size_t c = 0; c < table_->components.size(); ++c) {
    const NameComponent& names = table_->components[c];
    if (!component.empty() && table_->component(component) >= 0 && names.name != component)
      continue;
    for (const CheckpointSpelling& spelling : names.checkpoints) {
      if (!stem.starts_with(spelling.prefix)) continue;
      const NameColumn& column = names.columns[static_cast<size_t>(spelling.column)];
      std::string rest(stem.substr(spelling.prefix.size()));
      auto place = column.dotted.find(rest);
      if (place == column.dotted.end() && rest.ends_with("_bias")) {  // OpenCLIP's in_proj_bias
        rest = rest.substr(0, rest.size() - 4) + "weight";
        place = column.dotted.find(rest);
        target->bias = place != column.dotted.end();
      }
      if (place == column.dotted.end()) continue;
      const Spelled* layer = &column.layers[static_cast<size_t>(place->second)];
      // Two text encoders may spell alike: then the one of this width.
      if (found && layer->rows != rows) continue;
      target->layer = layer;
      target->component = static_cast<int>(c);
      found = true;
      break;
    }
  }
  return found;
}

Status MergePlan::plan(const SafetensorsReader& file, const std::string& component,
                       std::map<std::string, MergeWork, std::less<>>* work) {
  for (const TensorEntry& tensor : file.entries()) {
    Target target;
    const int64_t rows = tensor.shape.empty() ? 1 : tensor.shape[0];
    if (!find_target(tensor.name, component, rows, &target)) continue;
    MergeWork here;
    LORAACCEL_RETURN_IF_ERROR(plan_tensor(file, tensor, target, &here));
    if (here.shares.empty()) continue;
    if (is_quantised(tensor.dtype))
      return refuse(StatusCode::kInvalidArgument, file, tensor,
                    std::string("is quantised (") + file_dtype_name(tensor.dtype) +
                        "): merging would round it again. Keep the adapter apart, or merge into "
                        "the model that the "
                        "quantised one was made of");
    std::string scale(tensor.name.substr(0, tensor.name.rfind('.')));
    for (const char* ending : {".scale_weight", ".weight_scale", ".weight_scale_inv"}) {
      if (file.find(scale + ending) == nullptr) continue;
      return refuse(StatusCode::kInvalidArgument, file, tensor,
                    "has a scale of its own, " + scale + ending +
                        ": merging would need another one. Keep the adapter apart, or merge into "
                        "the model that this "
                        "one was made of");
    }
    work->emplace(tensor.name, std::move(here));
  }
  return Status();
}

Status MergePlan::plan_tensor(const SafetensorsReader& file, const TensorEntry& tensor,
                              const Target& target, MergeWork* work) {
  std::vector<size_t> items;
  if (target.layer == nullptr) {
    items = by_layer_[{"", target.path}];
  } else {
    for (const SpelledPiece& piece : target.layer->pieces) {
      const NativeModule& module = table_->modules[static_cast<size_t>(piece.module)];
      const auto found = by_layer_.find(
          {table_->components[static_cast<size_t>(target.component)].name, module.path});
      if (found == by_layer_.end()) continue;
      for (const size_t i : found->second) {
        if (std::find(items.begin(), items.end(), i) == items.end()) items.push_back(i);
      }
    }
  }
  for (const size_t i : items)
    LORAACCEL_RETURN_IF_ERROR(place(file, tensor, target, &items_[i], work));
  return Status();
}

Status MergePlan::place(const SafetensorsReader& file, const TensorEntry& tensor,
                        const Target& target, Item* item, MergeWork* work) {
  const AdapterEntry& entry = *item->entry;
  const std::vector<Role> biases = bias_roles(entry);
  if (target.bias ? biases.empty() : !has_weight(entry)) return Status();
  const std::string& key = entry.tensors[0].key.empty() ? entry.path : entry.tensors[0].key;
  const int64_t rows = tensor.shape.empty() ? 0 : tensor.shape[0];
  const int64_t out = entry.out();
  const bool whole = entry.rows.empty();
  const int64_t native = whole ? out : entry.native_rows;
  std::vector<MergeShare> shares;
  if (target.layer == nullptr) {
    if (rows != out)
      return refuse(StatusCode::kShapeMismatch, file, tensor,
                    "has shape " + shape_of(tensor) + ", and " + key + " changes " +
                        std::to_string(out) + " rows");
    shares.push_back({&entry, item->strength, 0, 0, out});
  } else {
    for (const SpelledPiece& piece : target.layer->pieces) {
      const NativeModule& module = table_->modules[static_cast<size_t>(piece.module)];
      if (module.path != entry.path) continue;
      if (rows * module.out != target.layer->rows * native || piece.rows * native % module.out != 0)
        return refuse(StatusCode::kShapeMismatch, file, tensor,
                      "has shape " + shape_of(tensor) + ", and " + key + " belongs to a layer of " +
                          std::to_string(native) + " rows where " + table_->base + " has " +
                          std::to_string(module.out));
      const auto size = [&](int64_t n) { return n * native / module.out; };
      std::vector<RowPiece> covered = entry.rows;
      if (whole) covered.push_back({0, 0, out});
      for (const RowPiece& own : covered) {
        const int64_t begin = std::max(own.native_row, size(piece.native_row));
        const int64_t end =
            std::min(own.native_row + own.rows, size(piece.native_row + piece.rows));
        if (begin >= end) continue;
        shares.push_back({&entry, item->strength, own.row + begin - own.native_row,
                          size(piece.row) + begin - size(piece.native_row), end - begin});
      }
    }
  }
  if (target.bias) {
    if (biases.size() > 1)
      return refuse(StatusCode::kInvalidArgument, file, tensor,
                    "has two differences in the adapter");
    work->vector = true;
    work->role = biases[0];
    if (entry.find(biases[0])->numel() != out)
      return refuse(StatusCode::kShapeMismatch, file, tensor,
                    "has another size than " + entry.find(biases[0])->key);
    item->bias_placed = true;
  } else {
    int64_t columns = 1;
    for (size_t i = 1; i < tensor.shape.size(); ++i) columns *= tensor.shape[i];
    const int64_t own = entry.kind == AdapterKind::kReplace ? columns_of(*entry.find(Role::kWeight))
                                                            : delta_columns(entry);
    if (own != columns)
      return refuse(StatusCode::kShapeMismatch, file, tensor,
                    "has shape " + shape_of(tensor) + ", and " + key + " is for " +
                        std::to_string(own) + " numbers in a row");
    if (!dora_on_output(entry) && shares.size() != 1)
      return refuse(StatusCode::kInvalidArgument, file, tensor,
                    "is a part of what a DoRA over inputs changes");
    for (const MergeShare& share : shares) item->rows_placed += share.rows;
  }
  work->shares.insert(work->shares.end(), shares.begin(), shares.end());
  return Status();
}

std::vector<std::string> MergePlan::unused() const {
  std::vector<std::string> names;
  for (const Item& item : items_) {
    const AdapterEntry& e = *item.entry;
    if (has_weight(e) && item.rows_placed < e.out()) names.push_back(e.component + "." + e.path);
    if (!bias_roles(e).empty() && !item.bias_placed)
      names.push_back(e.component + "." + e.path + " (bias)");
  }
  return names;
}

}  // namespace loraaccel
