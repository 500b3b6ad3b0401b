// Adapter files (LoRA and its relatives) of any tool, read into one form.
//
// Which file is which, and which key belongs to which layer, is looked up in tables (src/data/names); nothing is guessed
// from substrings. A key that no table knows, and half of a pair, are errors with counts and names.
//
// Letters: r rank, out and in the sizes of the frozen layer's weight, k a convolution's window.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loraaccel/file_dtype.h"
#include "loraaccel/status.h"

namespace loraaccel {

// What a tensor of an adapter is, whatever its key looks like. Shapes in kohya's spelling.
enum class AdapterRole : int8_t {
  kDown,   // A: [r, in], [r, in, k, k]; with a core [r, in, 1, 1]
  kUp,     // B: [out, r] or [out, r, 1, 1]
  kMid,    // Tucker core [r, r, k, k]
  kAlpha,  // one number
  kDoraScale,  // [out, 1], [out, 1, 1, 1] or [out]: the norm is over each output's row; [1, in]: over each input
  kUpBias,      // [out]: a bias of the adapter's own
  kDiff,        // a whole difference, the weight's shape
  kDiffBias,    // the same of the bias
  kNormWeight,  // of a norm's weight and bias [out]
  kNormBias,
  kHada1A,  // LoHa: delta = s (1A 1B) * (2A 2B), element by element
  kHada1B,
  kHada2A,
  kHada2B,
  kHadaT1,  // Tucker cores [r, r, k, k]; then A is [r, out] and B [r, in]
  kHadaT2,
  kKron1,  // LoKr: delta = s kron(1, 2); a factor is whole, or A B, or with core T2
  kKron1A,
  kKron1B,
  kKron2,
  kKron2A,
  kKron2B,
  kKronT2,
  kIa3,
  kIa3OnInput,
  kOftBlocks,
  kRescale,
  kGloraA1,
  kGloraA2,
  kGloraB1,
  kGloraB2,
  kGloraBm,
  kEmbeddingDown,  // A of an embedding [r, vocabulary]
  kEmbeddingUp,    // B [dimension, r]; delta = s (B A)^T
  kWeight,         // a whole weight that takes the frozen one's place, and its bias
  kBias,
};
constexpr int kNumAdapterRoles = static_cast<int>(AdapterRole::kBias) + 1;

// "lora_down", "lora_up", "hada_w1_a" ... Never null.
const char* adapter_role_name(AdapterRole role) noexcept;
bool parse_adapter_role(std::string_view name, AdapterRole* role) noexcept;

enum class AdapterKind : int8_t {
  kLora,  // with a Tucker core too, and with DoRA
  kLoha,
  kLokr,
  kFull,   // diff
  kNorm,   // w_norm, b_norm
  kIa3,    // read and renamed only
  kOft,    // read and renamed only
  kGlora,  // read and renamed only
  kEmbedding,
  kReplace,  // PEFT's modules_to_save
};
const char* adapter_kind_name(AdapterKind kind) noexcept;  // "lora", "loha" ...

struct AdapterTensor {
  AdapterRole role = AdapterRole::kDown;
  std::string key;  // in the file it was read from; "" where it was made
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;         // dense, row-major, of any alignment
  std::shared_ptr<const void> owner;  // keeps data where it is

  int64_t numel() const noexcept;
  uint64_t size_bytes() const noexcept;
};

// How the factor of an adapter's delta came about.
enum class ScaleRule : int8_t {
  kAlphaTensor,   // the file's alpha / rank
  kConfigAlpha,   // lora_alpha / rank of a PEFT or diffusers configuration
  kAlphaPattern,  // the same with alpha_pattern's entry for the layer
  kNoAlpha,       // no alpha anywhere (or zero): alpha = rank, factor 1
  kWholeFactors,  // LoKr with both factors whole has no rank: factor 1
  kNone,          // a kind without a factor
};
const char* scale_rule_name(ScaleRule rule) noexcept;

struct ScaleSource {
  std::optional<double> alpha_tensor = std::nullopt;
  std::optional<double> config_alpha = std::nullopt;
  std::string pattern = {};  // of alpha_pattern, where config_alpha comes from there
  bool rank_stabilised = false;
  int64_t rank = 0;         // 0: the kind has none, or both factors are whole
  int64_t config_rank = 0;  // r of the configuration, for adapters without a rank of their own
};

struct AdapterScale {
  double value = 1;  // the factor itself
  ScaleRule rule = ScaleRule::kNone;
  std::string text;  // "0.5 = 8 / 16, the file's alpha / rank"
};

// The one place that knows how alpha and rank make a factor: alpha / r, alpha / sqrt(r) where rank-stabilised, 1 where
// there is no alpha. kInvalidArgument for an alpha that is not finite.
Status resolve_scale(const ScaleSource& source, AdapterScale* scale);

// Rows [row, row + rows) of an entry are rows [native_row, native_row + rows) of the layer it names.
struct RowPiece {
  int64_t row = 0;
  int64_t native_row = 0;
  int64_t rows = 0;
};

// All that an adapter has for one layer, or for some rows of it.
struct AdapterEntry {
  std::string
      component;     // "unet", "transformer", "text_encoder" ...; "model" where there is no table
  std::string path;  // of the layer, as the original checkpoint of the base model spells it
  // Empty: all rows of the layer in their order. Else what the entry covers, as where a file names q, k and v and the
  // original has one matrix for them.
  std::vector<RowPiece> rows;
  int64_t native_rows = 0;  // of the whole layer; 0 where unknown
  AdapterKind kind = AdapterKind::kLora;
  std::vector<AdapterTensor> tensors;
  int64_t rank = 0;  // from the shapes; 0 where the kind has none
  AdapterScale scale;

  const AdapterTensor* find(AdapterRole role) const noexcept;
  int64_t out() const noexcept;  // rows that the entry covers; 0 where its kind does not say
};

using AdapterMetadata = std::vector<std::pair<std::string, std::string>>;

struct AdapterReport {
  std::vector<std::string> unused;   // keys that no table knows, or that belong to nothing
  std::vector<std::string> missing;  // "<layer>: <role>" of half pairs
  std::vector<std::string> notes;    // what a reader should know
};

struct Adapter {
  std::string base;                    // "sd15", "sdxl" ...; "" where no table fits
  std::vector<std::string> also_fits;  // bases that fit as well
  std::string format;                  // "kohya", "peft" ...
  std::vector<AdapterEntry> entries;   // in the order of the file
  AdapterMetadata metadata;
  // The text of adapter_config.json or of the metadata's lora_adapter_metadata; "" where there is none.
  std::string config;
  AdapterReport report;
};

struct ReadAdapterOptions {
  std::string base;              // of the adapter; "": found out
  std::string component;         // of PEFT files that could be several; "": found out
  bool allow_unmatched = false;  // go on without the keys of report.unused
  // Layers of a model that no table describes, by their dotted paths: keys in kohya's flat spelling are looked up among
  // them. Two paths with one flat spelling are an error.
  std::vector<std::string> modules;
};

// Reads a .safetensors file, or a folder: PEFT's (adapter_config.json beside the weights), diffusers', or one of PEFT
// folders named after components. Tensors are views of the mapped file. PEFT's configuration beside a file is read, too.
// Fails with kFileError, kMalformedFile (not an adapter, keys that no table knows, half pairs, shapes that do not fit
// together); *adapter then holds the report.
Status read_adapter(const std::string& path, const ReadAdapterOptions& options, Adapter* adapter);

// The same from tensors in memory. `name` stands for the path in messages, `config` for adapter_config.json.
struct AdapterSource {
  std::string name;
  std::string config;
  std::string component;               // the folder's name, where it is a component's
  std::vector<AdapterTensor> tensors;  // role is ignored
  AdapterMetadata metadata;
};
Status read_adapter(const std::vector<AdapterSource>& sources, const ReadAdapterOptions& options,
                    Adapter* adapter);

// For adapters that are made, not read: sets kind and rank of an entry from its tensors and checks that they fit together.
// The factor is the alpha tensor's, else that of `alpha`, else entry->scale.value as it is. native_rows is set where it is 0
// and the entry covers the layer. kMalformedFile as of read_adapter().
Status complete_adapter_entry(std::optional<double> alpha, AdapterEntry* entry);

// Names of all base models with a table, and of all formats that are written.
std::vector<std::string> adapter_bases();
std::vector<std::string> adapter_formats();

}  // namespace loraaccel
