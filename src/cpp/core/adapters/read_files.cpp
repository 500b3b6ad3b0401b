// Adapters from files and folders.
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "adapters/text_file.h"
#include "loraaccel/adapter.h"
#include "loraaccel/safetensors.h"

namespace loraaccel {
namespace {

constexpr size_t kMaxConfigBytes = size_t{64} << 20;
constexpr const char* kConfigName = "adapter_config.json";
// What the weights of a folder may be called; the first that is there is read.
constexpr const char* kWeightNames[] = {"adapter_model.safetensors",
                                        "pytorch_lora_weights.safetensors"};
constexpr const char* kComponents[] = {"unet", "transformer", "text_encoder", "text_encoder_2",
                                       "text_encoder_3"};

Status read_source(const std::string& path, AdapterSource* source) {
  auto reader = std::make_shared<SafetensorsReader>();
  LORAACCEL_RETURN_IF_ERROR(SafetensorsReader::open(path, reader.get()));
  source->name = path;
  for (const TensorEntry& entry : reader->entries()) {
    AdapterTensor tensor;
    tensor.key = entry.name;
    tensor.dtype = entry.dtype;
    tensor.shape.assign(entry.shape.begin(), entry.shape.end());
    void* data = nullptr;
    LORAACCEL_RETURN_IF_ERROR(reader->view(entry, &data));
    tensor.data = data;
    tensor.owner = reader;
    source->tensors.push_back(std::move(tensor));
  }
  for (const MetadataItem& item : reader->metadata())
    source->metadata.emplace_back(std::string(item.key), std::string(item.value));
  const std::string config = join_path(parent_of(path), kConfigName);
  if (file_exists(config))
    LORAACCEL_RETURN_IF_ERROR(read_text_file(config, kMaxConfigBytes, &source->config));
  return Status();
}

std::string weights_of(const std::string& folder) {
  for (const char* name : kWeightNames) {
    std::string path = join_path(folder, name);
    if (file_exists(path)) return path;
  }
  return "";
}

bool is_component(const std::string& name) {
  return std::any_of(std::begin(kComponents), std::end(kComponents),
                     [&](const char* c) { return name == c; });
}

// The only .safetensors file of a folder; "" where there is none or are several.
std::string only_file(const std::string& folder) {
  std::string found;
  std::error_code error;
  for (const auto& item : std::filesystem::directory_iterator(folder, error)) {
    if (item.path().extension() != ".safetensors") continue;
    if (!found.empty()) return "";
    found = item.path().string();
  }
  return found;
}

Status sources_of(const std::string& path, std::vector<AdapterSource>* sources) {
  if (!folder_exists(path)) {
    sources->emplace_back();
    const std::string folder = file_name_of(parent_of(path));
    LORAACCEL_RETURN_IF_ERROR(read_source(path, &sources->back()));
    if (is_component(folder) && !sources->back().config.empty()) sources->back().component = folder;
    return Status();
  }
  std::string weights = weights_of(path);
  if (weights.empty()) {
    for (const char* component : kComponents) {
      const std::string inner = weights_of(join_path(path, component));
      if (inner.empty()) continue;
      sources->emplace_back();
      LORAACCEL_RETURN_IF_ERROR(read_source(inner, &sources->back()));
      sources->back().component = component;
    }
    if (!sources->empty()) return Status();
    weights = only_file(path);
  }
  if (weights.empty())
    return Status(
        StatusCode::kMalformedFile,
        path + " is a folder without an adapter, expected " + kWeightNames[0] + ", " +
            kWeightNames[1] +
            ", one .safetensors file, or folders of these names: unet, transformer, text_encoder");
  sources->emplace_back();
  LORAACCEL_RETURN_IF_ERROR(read_source(weights, &sources->back()));
  if (is_component(file_name_of(path))) sources->back().component = file_name_of(path);
  return Status();
}

}  // namespace

Status read_adapter(const std::string& path, const ReadAdapterOptions& options, Adapter* adapter) {
  *adapter = Adapter();
  std::vector<AdapterSource> sources;
  LORAACCEL_RETURN_IF_ERROR(sources_of(path, &sources));
  return read_adapter(sources, options, adapter);
}

}  // namespace loraaccel
