// Adapters into files and folders.
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "adapters/text_file.h"
#include "loraaccel/adapter_convert.h"
#include "loraaccel/safetensors.h"

namespace loraaccel {
namespace {

constexpr const char* kConfigName = "adapter_config.json";
constexpr const char* kWeightsName = "adapter_model.safetensors";

bool ends_with_safetensors(const std::string& path) { return path.ends_with(".safetensors"); }

Status save(const SpelledFile& file, const std::string& path, const ConvertOptions& options,
            WriteReport* report, std::string* hash) {
  std::vector<TensorToSave> tensors;
  for (const AdapterTensor& t : file.tensors) {
    TensorToSave out;
    out.name = t.key;
    out.dtype = t.dtype;
    out.shape = t.shape;
    out.data = t.data;
    tensors.push_back(std::move(out));
  }
  SaveMetadata metadata(file.metadata.begin(), file.metadata.end());
  std::erase_if(metadata, [](const auto& m) {
    return m.first == "sshs_model_hash" || m.first == "sshs_legacy_hash";
  });
  SaveOptions save_options;
  save_options.float_dtype = options.dtype;
  save_options.hashes = true;
  // PEFT and diffusers look at nothing but "format"
  save_options.hashes_in_metadata = options.format != "peft" && options.format != "diffusers";
  SaveReport saved;
  LORAACCEL_RETURN_IF_ERROR(save_safetensors(path, tensors, &metadata, save_options, &saved));
  for (const CastLoss& loss : saved.losses) {
    report->notes.push_back(loss.name + ": " + std::to_string(loss.flushed_to_zero) +
                            " numbers became zero, " + std::to_string(loss.became_infinite) +
                            " infinite");
  }
  *hash = saved.model_hash;
  report->paths.push_back(path);
  return Status();
}

// A folder that appears complete: made beside its place, and moved there.
class NewFolder {
 public:
  explicit NewFolder(const std::string& target)
      : target_(target), made_(target + ".loraaccel-new") {}
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder() {
    std::error_code error;
    if (!done_) std::filesystem::remove_all(made_, error);
  }

  const std::string& path() const { return made_; }

  Status make() {
    std::error_code error;
    std::filesystem::remove_all(made_, error);
    return make_folder(made_);
  }

  // Files of an existing target are replaced one by one, each complete; others there stay.
  Status move(std::vector<std::string>* paths) {
    namespace fs = std::filesystem;
    std::error_code error;
    if (!fs::exists(target_, error)) {
      fs::rename(made_, target_, error);
      if (error) return failed(error);
      done_ = true;
    } else {
      for (const std::string& path : *paths) {
        const fs::path to = fs::path(target_) / fs::relative(path, made_);
        fs::create_directories(to.parent_path(), error);
        if (!error) fs::rename(path, to, error);
        if (error) return failed(error);
      }
    }
    for (std::string& path : *paths)
      path = (fs::path(target_) / fs::path(path.substr(made_.size() + 1))).string();
    return Status();
  }

 private:
  Status failed(const std::error_code& error) const {
    return Status(StatusCode::kFileError,
                  target_ + ": moving the new files there failed: " + error.message(),
                  error.value());
  }

  std::string target_;
  std::string made_;
  bool done_ = false;
};

Status save_folder(const std::vector<SpelledFile>& files, const std::string& path,
                   const ConvertOptions& options, WriteReport* report) {
  std::string target = path;
  while (target.size() > 1 && target.back() == '/') target.pop_back();
  NewFolder folder(target);
  LORAACCEL_RETURN_IF_ERROR(folder.make());
  for (const SpelledFile& file : files) {
    const std::string inner =
        file.folder.empty() ? folder.path() : join_path(folder.path(), file.folder);
    LORAACCEL_RETURN_IF_ERROR(make_folder(inner));
    std::string hash;
    LORAACCEL_RETURN_IF_ERROR(save(file, join_path(inner, kWeightsName), options, report, &hash));
    if (files.size() == 1) report->model_hash = hash;
    LORAACCEL_RETURN_IF_ERROR(write_text_file(join_path(inner, kConfigName), file.config));
    report->paths.push_back(join_path(inner, kConfigName));
  }
  return folder.move(&report->paths);
}

}  // namespace

Status write_adapter(const Adapter& adapter, const std::string& path, const ConvertOptions& options,
                     WriteReport* report) {
  WriteReport local;
  if (report == nullptr) report = &local;
  *report = WriteReport();
  std::vector<SpelledFile> files;
  LORAACCEL_RETURN_IF_ERROR(spell_adapter(adapter, options, &files, &report->notes));
  if (options.format == "peft") {
    if (ends_with_safetensors(path))
      return Status(
          StatusCode::kInvalidArgument,
          path +
              " is the name of a file, expected a folder: PEFT keeps alpha in adapter_config.json");
    return save_folder(files, path, options, report);
  }
  if (folder_exists(path))
    return Status(StatusCode::kInvalidArgument, path + " is a folder, expected the name of a file");
  return save(files[0], path, options, report, &report->model_hash);
}

Status convert_adapter(const std::string& source, const std::string& target,
                       const ReadAdapterOptions& read, const ConvertOptions& options,
                       Adapter* adapter, WriteReport* report) {
  Adapter local;
  if (adapter == nullptr) adapter = &local;
  LORAACCEL_RETURN_IF_ERROR(read_adapter(source, read, adapter));
  return write_adapter(*adapter, target, options, report);
}

}  // namespace loraaccel
