#include "checkpoint/save_plan.h"

#include <algorithm>

#include "checkpoint/cast.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors_header.h"

namespace loraaccel {
namespace {

constexpr const char* kModelHash = "sshs_model_hash";
constexpr const char* kLegacyHash = "sshs_legacy_hash";

Status invalid(const std::string& what, const std::string& why) {
  return {StatusCode::kInvalidArgument, what + ": " + why};
}

Status plan_tensor(const std::string& what, const TensorToSave& t, const SaveOptions& options,
                   PlannedTensor* planned) {
  const std::string name = "tensor '" + t.name + "'";
  if (!is_utf8(t.name)) return invalid(what, name + ": the name is not UTF-8");
  if (t.name == "__metadata__")
    return invalid(what, name + ": the format keeps this name to itself");
  if (file_dtype_bits(t.dtype) == 0) return invalid(what, name + ": no such dtype");
  if (t.shape.size() > kMaxDimensions)
    return invalid(what, name + ": " + std::to_string(t.shape.size()) +
                             " dimensions, expected at most " + std::to_string(kMaxDimensions));
  uint64_t bytes;
  if (!tensor_bytes(t.dtype, t.shape, &bytes))
    return invalid(what, name + ": " + file_dtype_name(t.dtype) + " " + shape_text(t.shape) +
                             " is no whole number of bytes below 2^64");
  if (bytes > 0 && t.data == nullptr && t.fetch == nullptr)
    return invalid(what, name + ": " + std::to_string(bytes) + " bytes and no data");
  const bool cast =
      options.float_dtype && can_cast_from(t.dtype) && *options.float_dtype != t.dtype;
  *planned = {&t, t.dtype, 0, bytes, 0};
  if (cast) {
    planned->dtype = *options.float_dtype;
    planned->elements = bytes * 8 / static_cast<uint64_t>(file_dtype_bits(t.dtype));
    if (!tensor_bytes(planned->dtype, t.shape, &planned->end))
      return invalid(what, name + ": too large");
  }
  return {};
}

void set(SaveMetadata* metadata, const char* key, const std::string& value) {
  for (auto& item : *metadata) {
    if (item.first == key) {
      item.second = value;
      return;
    }
  }
  metadata->emplace_back(key, value);
}

Status plan_metadata(const std::string& what, const SaveMetadata* metadata,
                     const SaveOptions& options, SavePlan* plan) {
  plan->has_metadata = metadata != nullptr || options.hashes_in_metadata;
  if (metadata != nullptr) plan->metadata = *metadata;
  if (options.hashes_in_metadata) {
    set(&plan->metadata, kModelHash, std::string(64, '0'));
    set(&plan->metadata, kLegacyHash, std::string(8, '0'));
  }
  std::sort(plan->metadata.begin(), plan->metadata.end());
  for (size_t i = 0; i < plan->metadata.size(); ++i) {
    const auto& [key, value] = plan->metadata[i];
    if (!is_utf8(key) || !is_utf8(value))
      return invalid(what, "metadata '" + key + "': key or value is not UTF-8");
    if (i > 0 && plan->metadata[i - 1].first == key)
      return invalid(what, "the metadata key '" + key + "' occurs twice");
  }
  return {};
}

Status check_names(const std::string& what, const std::vector<PlannedTensor>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const PlannedTensor& t : tensors) names.emplace_back(t.tensor->name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return {};
  return invalid(what, "the tensor name '" + std::string(*twice) + "' occurs twice");
}

std::string header_of(const SavePlan& plan, const SaveMetadata* metadata) {
  std::vector<HeaderTensor> tensors;
  tensors.reserve(plan.tensors.size());
  for (const PlannedTensor& t : plan.tensors)
    tensors.push_back({t.tensor->name, t.dtype, t.tensor->shape, t.begin, t.end});
  return format_header(tensors, metadata);
}

}  // namespace

std::string SavePlan::header_with(const std::string& model_hash,
                                  const std::string& legacy_hash) const {
  SaveMetadata with = metadata;
  set(&with, kModelHash, model_hash);
  set(&with, kLegacyHash, legacy_hash);
  return header_of(*this, &with);
}

Status plan_save(const std::string& what, std::span<const TensorToSave> tensors,
                 const SaveMetadata* metadata, const SaveOptions& options, SavePlan* plan) {
  if (options.float_dtype && !can_cast_to(*options.float_dtype))
    return {StatusCode::kUnsupportedDtype,
            what + ": cannot write floats as " + file_dtype_name(*options.float_dtype) +
                ", expected F64, F32, F16, BF16, F8_E4M3 or F8_E5M2"};
  plan->tensors.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    LORAACCEL_RETURN_IF_ERROR(plan_tensor(what, tensors[i], options, &plan->tensors[i]));
  LORAACCEL_RETURN_IF_ERROR(check_names(what, plan->tensors));
  LORAACCEL_RETURN_IF_ERROR(plan_metadata(what, metadata, options, plan));
  std::sort(plan->tensors.begin(), plan->tensors.end(),
            [](const PlannedTensor& a, const PlannedTensor& b) {
              if (a.dtype != b.dtype) return a.dtype > b.dtype;
              return a.tensor->name < b.tensor->name;
            });
  uint64_t at = 0;
  for (PlannedTensor& t : plan->tensors) {
    t.begin = at;
    if (__builtin_add_overflow(t.end, at, &t.end) || t.end > INT64_MAX)
      return invalid(what, "more than 2^63 bytes of tensors");
    at = t.end;
  }
  plan->data_bytes = at;
  plan->header = header_of(*plan, plan->has_metadata ? &plan->metadata : nullptr);
  if (plan->header.size() - 8 > kMaxHeaderBytes)
    return invalid(what, "a header of " + std::to_string(plan->header.size() - 8) +
                             " bytes, expected at most " + std::to_string(kMaxHeaderBytes));
  if (options.hashes || options.hashes_in_metadata) {
    SaveMetadata training;
    for (const auto& item : plan->metadata) {
      if (item.first.starts_with("ss_")) training.push_back(item);
    }
    plan->legacy_header = header_of(*plan, &training);
  }
  return {};
}

}  // namespace loraaccel
