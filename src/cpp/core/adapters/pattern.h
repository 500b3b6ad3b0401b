// The regular expressions of PEFT's rank_pattern and alpha_pattern.
#pragma once

#include <string_view>

#include "loraaccel/status.h"

namespace loraaccel {

// Does `path`, or a tail of it that begins after a ".", match all of `pattern`? That is how PEFT takes the keys of its
// patterns. Known: characters, ".", [sets], \d \w \s and their negations, groups, |, * + ? and {m,n}. Time is
// proportional to the lengths of both: a hostile pattern cannot hang the program. kInvalidArgument for any other syntax,
// and for patterns that are too long.
Status pattern_matches(std::string_view pattern, std::string_view path, bool* matches);

}  // namespace loraaccel
