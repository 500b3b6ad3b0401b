// Small files in one piece.
#pragma once

#include <string>

#include "loraaccel/status.h"

namespace loraaccel {

bool file_exists(const std::string& path);
bool folder_exists(const std::string& path);
std::string join_path(const std::string& folder, const std::string& name);
std::string parent_of(const std::string& path);
std::string file_name_of(const std::string& path);  // the last component

// kFileError; kMalformedFile for more than `limit` bytes.
Status read_text_file(const std::string& path, size_t limit, std::string* text);
// Complete or not at all.
Status write_text_file(const std::string& path, const std::string& text);
Status make_folder(const std::string& path);  // and those above it

}  // namespace loraaccel
