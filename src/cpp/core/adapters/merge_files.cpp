// Base models in, merged ones out, a tensor at a time.
#include <cerrno>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "adapters/keep_originals.h"
#include "adapters/merge_plan.h"
#include "adapters/merge_weight.h"
#include "adapters/model_files.h"
#include "adapters/numbers.h"
#include "adapters/staged_files.h"
#include "adapters/text_file.h"
#include "loraaccel/safetensors.h"

namespace loraaccel {
namespace {

struct BaseFile {
  std::string source;
  std::string target;
  std::string name;  // below the folder; "": the model is one file
  std::string component;
  SafetensorsReader reader;
  std::map<std::string, MergeWork, std::less<>> work;
};

// Files to be merged, and to be copied as they are.
struct BaseModel {
  std::vector<BaseFile> files;
  std::vector<std::pair<std::string, std::string>> others;
};

Status find_files(const std::string& base, const std::string& target, BaseModel* model) {
  if (!folder_exists(base)) {
    model->files.push_back({base, target, "", "", {}, {}});
    return Status();
  }
  std::vector<std::string> names;
  LORAACCEL_RETURN_IF_ERROR(list_files(base, &names));
  for (const std::string& name : names) {
    const std::string from = join_path(base, name);
    const std::string to = join_path(target, name);
    if (!name.ends_with(".safetensors")) {
      model->others.emplace_back(from, to);
      continue;
    }
    const std::string parent = parent_of(name);
    model->files.push_back({from, to, name, file_name_of(parent.empty() ? base : parent), {}, {}});
  }
  if (model->files.empty())
    return Status(StatusCode::kMalformedFile,
                  base + " is a folder without a .safetensors file, expected a base model");
  return Status();
}

// Counts the tensors of all files.
struct Steps {
  const MergeOptions& options;
  int64_t total;
  int64_t done = 0;

  Status next() {
    if (options.progress == nullptr) return Status();
    return options.progress(options.progress_host, done++, total);
  }
};

// Lends the writer the bytes of one base tensor: as they are, or merged.
class BaseTensor {
 public:
  BaseTensor(const SafetensorsReader& reader, const TensorEntry& entry, const MergeWork* work,
             const ExecContext& ctx, MergeReport* report)
      : reader_(reader), entry_(entry), work_(work), ctx_(ctx), report_(report) {}

 private:
  Status lend(uint64_t offset, size_t bytes, const void** data) {
    if (work_ == nullptr) {
      if (bytes > size_) {
        memory_.reset(new (std::nothrow) char[bytes]);
        size_ = memory_ == nullptr ? 0 : bytes;
        if (memory_ == nullptr)
          return Status(StatusCode::kOutOfMemory, "no memory to copy " + std::string(entry_.name));
      }
      LORAACCEL_RETURN_IF_ERROR(reader_.read(entry_, offset, bytes, memory_.get()));
      *data = memory_.get();
    } else {
      if (offset == 0) LORAACCEL_RETURN_IF_ERROR(merge());
      *data = memory_.get() + offset;
    }
    return Status();
  }

  Status merge() {
    const uint64_t bytes = entry_.size_bytes();
    memory_.reset(new (std::nothrow) char[bytes]);
    if (memory_ == nullptr)
      return Status(StatusCode::kOutOfMemory, "no memory for " + std::string(entry_.name) + ", " +
                                                  std::to_string(bytes) + " bytes");
    LORAACCEL_RETURN_IF_ERROR(reader_.read(entry_, 0, bytes, memory_.get()));
    MergedWeight w;
    w.name = reader_.path() + ": " + std::string(entry_.name);
    w.dtype = entry_.dtype;
    w.rows = entry_.shape.empty() ? 1 : entry_.shape[0];
    w.columns = 1;
    for (size_t i = 1; i < entry_.shape.size(); ++i) w.columns *= entry_.shape[i];
    w.data = memory_.get();
    LORAACCEL_RETURN_IF_ERROR(merge_weight(ctx_, *work_, &w));
    if (w.rounding > 0)
      report_->notes.push_back(std::string(entry_.name) + ": rounded to " +
                               file_dtype_name(w.dtype) + ", by up to " + number_text(w.rounding));
    return Status();
  }

  const SafetensorsReader& reader_;
  const TensorEntry& entry_;
  const MergeWork* work_;
  const ExecContext& ctx_;
  MergeReport* report_;
  std::unique_ptr<char[]> memory_;
  size_t size_ = 0;

  friend class BaseTensors;  // asks for the bytes, and gives the memory back
};

// All of a file; memory of the tensor before goes when the next is asked for.
class BaseTensors {
 public:
  BaseTensors(const BaseFile& file, const ExecContext& ctx, Steps* steps, MergeReport* report)
      : steps_(steps) {
    tensors_.reserve(file.reader.entries().size());
    hosts_.reserve(file.reader.entries().size());
    for (const TensorEntry& entry : file.reader.entries()) {
      const auto found = file.work.find(entry.name);
      tensors_.emplace_back(file.reader, entry, found == file.work.end() ? nullptr : &found->second,
                            ctx, report);
    }
    for (BaseTensor& t : tensors_) hosts_.push_back({this, &t});
  }

  std::vector<TensorToSave> list() {
    std::vector<TensorToSave> saves;
    for (Host& host : hosts_) {
      TensorToSave t;
      t.name = host.tensor->entry_.name;
      t.dtype = host.tensor->entry_.dtype;
      t.shape.assign(host.tensor->entry_.shape.begin(), host.tensor->entry_.shape.end());
      t.fetch = &fetch;
      t.fetch_host = &host;
      saves.push_back(std::move(t));
    }
    return saves;
  }

 private:
  struct Host {
    BaseTensors* all;
    BaseTensor* tensor;
  };

  static Status fetch(void* host, uint64_t offset, size_t bytes, const void** data) {
    const Host& h = *static_cast<Host*>(host);
    BaseTensor*& last = h.all->last_;
    if (last != h.tensor) {
      LORAACCEL_RETURN_IF_ERROR(h.all->steps_->next());
      if (last != nullptr) {
        last->memory_.reset();
        last->size_ = 0;
      }
      last = h.tensor;
    }
    return h.tensor->lend(offset, bytes, data);
  }

  std::vector<BaseTensor> tensors_;
  std::vector<Host> hosts_;
  Steps* steps_;
  BaseTensor* last_ = nullptr;
};

Status bad_index(std::string text, const char* before, const std::string& name, const char* after,
                 int error = 0) {
  text.append(before).append(name).append(after);
  return Status(error == 0 ? StatusCode::kMalformedFile : StatusCode::kFileError, std::move(text),
                error);
}

// Every shard that an index of the folder names is there, and in the folder.
Status check_index(const std::string& path) {
  constexpr size_t kLimit = size_t{64} << 20;
  std::string text;
  LORAACCEL_RETURN_IF_ERROR(read_text_file(path, kLimit, &text));
  const nlohmann::json index = nlohmann::json::parse(text, nullptr, false);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    return Status(StatusCode::kMalformedFile,
                  path + " is no index of shards: expected an object with weight_map");
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : index["weight_map"].items()) {
    if (!shard.is_string() || shard.get_ref<const std::string&>().find('/') != std::string::npos)
      return bad_index(path, ": weight_map of ", tensor, " is no file name of its folder");
    shards.insert(shard.get<std::string>());
  }
  for (const std::string& shard : shards) {
    if (!file_exists(join_path(parent_of(path), shard)))
      return bad_index(path, " names ", shard, ", which is not there", ENOENT);
  }
  return Status();
}

// Where the original bytes of a file go.
std::string kept_place(const BaseFile& file, const std::string& keep) {
  return file.name.empty() ? keep : join_path(keep, file.name);
}

// The files that are written must be none of those that are read, apart from a model that is merged in place.
Status check_places(const BaseModel& model, const std::string& base, const std::string& target,
                    const std::string& keep) {
  if (keep.empty()) return Status();
  if (same_place(keep, target))
    return Status(StatusCode::kInvalidArgument,
                  keep + " is the merged model's own place, expected another for what is kept");
  const bool folder = !model.files[0].name.empty();
  if (folder && (inside(keep, base) || inside(keep, target)))
    return Status(StatusCode::kInvalidArgument,
                  keep + " is in a model's folder, expected another place for what is kept");
  for (const BaseFile& file : model.files) {
    if (same_place(kept_place(file, keep), file.source))
      return Status(StatusCode::kInvalidArgument,
                    keep + " is the base model, expected another place for what is kept of it");
  }
  return Status();
}

// Puts the original bytes of what changes in `file` aside, and its header, which changes in every file.
Status keep_file(const BaseFile& file, const std::string& keep, StagedFiles* staged,
                 std::string* identity) {
  identity->clear();
  if (keep.empty()) return Status();
  std::string path;
  LORAACCEL_RETURN_IF_ERROR(staged->place(kept_place(file, keep), &path));
  std::vector<const TensorEntry*> changed;
  for (const TensorEntry& entry : file.reader.entries()) {
    if (file.work.contains(entry.name)) changed.push_back(&entry);
  }
  return keep_originals(file.reader, changed, path, identity);
}

Status merge_file(const BaseFile& file, const std::string& path, const MergeOptions& options,
                  const ExecContext& ctx, const std::string& identity, Steps* steps,
                  MergeReport* report) {
  BaseTensors tensors(file, ctx, steps, report);
  const std::vector<TensorToSave> saves = tensors.list();
  SaveMetadata metadata;
  bool hashes = false;
  for (const MetadataItem& item : file.reader.metadata()) {
    if (item.key == "sshs_model_hash" || item.key == "sshs_legacy_hash") {
      hashes = true;
    } else if (item.key == "modelspec.hash_sha256") {
      report->notes.push_back(file.source +
                              ": modelspec.hash_sha256 is left out: it was of the model before");
    } else if (item.key != kIdentityKey) {
      metadata.emplace_back(item.key, item.value);
    }
  }
  if (!identity.empty()) metadata.emplace_back(kIdentityKey, identity);
  SaveOptions save;
  save.float_dtype = options.dtype;
  save.hashes = hashes;
  save.hashes_in_metadata = hashes;
  SaveReport saved;
  LORAACCEL_RETURN_IF_ERROR(save_safetensors(
      path, saves, metadata.empty() && !file.reader.has_metadata() ? nullptr : &metadata, save,
      &saved));
  for (const CastLoss& loss : saved.losses) {
    report->notes.push_back(loss.name + ": " + std::to_string(loss.flushed_to_zero) +
                            " numbers became zero, " + std::to_string(loss.became_infinite) +
                            " infinite");
  }
  return Status();
}

}  // namespace

Status merge_adapters(const std::string& base, std::span<const AdapterToMerge> adapters,
                      const std::string& target, const MergeOptions& options, MergeReport* report) {
  MergeReport local;
  if (report == nullptr) report = &local;
  *report = MergeReport();
  MergePlan plan;
  LORAACCEL_RETURN_IF_ERROR(plan.prepare(adapters));
  BaseModel model;
  LORAACCEL_RETURN_IF_ERROR(find_files(base, target, &model));
  if (!options.keep.empty() && options.dtype)
    return Status(StatusCode::kInvalidArgument,
                  options.keep + ": original bytes are kept where the dtype stays, " +
                      file_dtype_name(*options.dtype) + " would change every tensor");
  LORAACCEL_RETURN_IF_ERROR(check_places(model, base, target, options.keep));
  for (const auto& [from, to] : model.others) {
    if (from.ends_with(".safetensors.index.json")) LORAACCEL_RETURN_IF_ERROR(check_index(from));
  }
  for (BaseFile& file : model.files) {
    LORAACCEL_RETURN_IF_ERROR(SafetensorsReader::open(file.source, &file.reader));
    LORAACCEL_RETURN_IF_ERROR(plan.plan(file.reader, file.component, &file.work));
    report->changed += static_cast<int64_t>(file.work.size());
    report->tensors += static_cast<int64_t>(file.reader.entries().size());
  }
  report->unused = plan.unused();
  if (report->changed == 0)
    return Status(StatusCode::kInvalidArgument,
                  base + " has none of the layers that the adapter changes" +
                      (report->unused.empty() ? "" : ", as " + report->unused[0]));
  if (!report->unused.empty() && !options.allow_unmatched) {
    std::string names;
    for (size_t i = 0; i < report->unused.size() && i < 6; ++i)
      names += (i == 0 ? "" : ", ") + report->unused[i];
    return Status(StatusCode::kInvalidArgument, base + " has no weights for " +
                                                    std::to_string(report->unused.size()) +
                                                    " layers of the adapter: " + names +
                                                    ". allow_unmatched goes on without them");
  }
  const ExecContext ctx = default_context();
  StagedFiles staged;
  Steps steps{options, report->tensors};
  for (const BaseFile& file : model.files) {
    std::string identity;
    std::string path;
    LORAACCEL_RETURN_IF_ERROR(keep_file(file, options.keep, &staged, &identity));
    LORAACCEL_RETURN_IF_ERROR(staged.place(file.target, &path));
    LORAACCEL_RETURN_IF_ERROR(merge_file(file, path, options, ctx, identity, &steps, report));
  }
  for (const auto& [from, to] : model.others) LORAACCEL_RETURN_IF_ERROR(staged.copy(from, to));
  return staged.commit(&report->paths);
}

}  // namespace loraaccel
