#include <cmath>
#include <cstdio>

#include "adapters/numbers.h"
#include "loraaccel/adapter.h"

namespace loraaccel {

Status resolve_scale(const ScaleSource& source, AdapterScale* scale) {
  *scale = AdapterScale();
  const bool in_file = source.alpha_tensor.has_value();
  const std::optional<double> alpha = in_file ? source.alpha_tensor : source.config_alpha;
  if (alpha && !std::isfinite(*alpha))
    return Status(StatusCode::kInvalidArgument,
                  "alpha is " + number_text(*alpha) + ", expected a finite number");
  int64_t rank = source.rank;
  if (rank == 0 && !in_file && alpha) rank = source.config_rank;  // PEFT divides by r in any case
  if (rank == 0) {
    scale->rule = ScaleRule::kWholeFactors;
    scale->text = "1, both factors are whole matrices";
    return Status();
  }
  if (!alpha || *alpha == 0) {
    scale->rule = ScaleRule::kNoAlpha;
    scale->text = alpha ? "1, alpha is 0, which stands for the rank" : "1, there is no alpha";
    return Status();
  }
  const bool stabilised = source.rank_stabilised && !in_file;
  scale->value =
      *alpha / (stabilised ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
  scale->text = number_text(scale->value) + " = " + number_text(*alpha) + " / " +
                (stabilised ? "sqrt(" + std::to_string(rank) + ")" : std::to_string(rank));
  if (in_file) {
    scale->rule = ScaleRule::kAlphaTensor;
    scale->text += ", the file's alpha / rank";
  } else if (!source.pattern.empty()) {
    scale->rule = ScaleRule::kAlphaPattern;
    scale->text += ", alpha_pattern " + source.pattern;
  } else {
    scale->rule = ScaleRule::kConfigAlpha;
    scale->text += ", lora_alpha of the configuration";
  }
  if (stabilised) scale->text += ", rank-stabilised";
  return Status();
}

}  // namespace loraaccel
