#include "adapters/name_table.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "adapters/name_text.h"
#include "loraaccel/adapter_names.h"

namespace loraaccel::test {
namespace {

Status read(const char* text, NameTable* table) {
  const std::vector<NameText> texts = {{"t", text}, {"more", "linear more more 4 4\n"}};
  return read_name_table("t", &texts, table);
}

const char* const kTable = R"(
base t some-architecture
component unet
spell kohya lora_unet_ native flat
# a comment
linear a.$i.qkv  b.$i.[q|k|v]  3*$H  $H  i=0..1
linear a.{x,y}   =             {8,4}  2
linear a.mod     b.mod~        8 4
)";

TEST(NameTable, ExpandsVariablesAlternativesAndParts) {
  NameTable table;
  const Status status = read((std::string("set H=4\n") + kTable).c_str(), &table);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(table.base, "t");
  std::vector<std::string> paths;
  paths.reserve(table.modules.size());
  for (const NativeModule& m : table.modules) paths.push_back(m.path);
  EXPECT_EQ(paths, (std::vector<std::string>{"a.0.qkv", "a.1.qkv", "a.x", "a.y", "a.mod"}));
  EXPECT_EQ(table.modules[0].out, 12);
  const NameColumn& diffusers = table.components[0].columns[kDiffusersColumn];
  const Spelled& k = diffusers.layers[static_cast<size_t>(diffusers.dotted.at("b.1.k"))];
  ASSERT_EQ(k.pieces.size(), 1U);
  EXPECT_EQ(k.pieces[0].module, 1);
  EXPECT_EQ(k.pieces[0].native_row, 4);
  EXPECT_EQ(k.pieces[0].rows, 4);
  const Spelled& mod = diffusers.layers[static_cast<size_t>(diffusers.dotted.at("b.mod"))];
  ASSERT_EQ(mod.pieces.size(), 2U);  // halves changed over
  EXPECT_EQ(mod.pieces[0].native_row + mod.pieces[1].native_row, 4);
  EXPECT_NE(mod.pieces[0].row, mod.pieces[0].native_row);
  EXPECT_EQ(diffusers.flat.at("a_x"), diffusers.dotted.at("a.x"));
}

TEST(NameTable, MistakesNameTheFile) {
  for (const char* bad : {
           "base t a\nlinear x y 4\n",                           // too few words
           "base t a\ncomponent c\nlinear x.$z = 4 4\n",         // unknown variable
           "base t a\ncomponent c\nlinear {a,b} {c,d,e} 4 4\n",  // alternatives of different counts
           "base t a\ncomponent c\nlinear x = four 4\n",         // no number
           "base t a\ncomponent c\ncubic x = 4 4\n",             // unknown kind
           "base t a\ncomponent c\nlinear x = 4 4\nlinear x = 4 4\n",  // twice
           "base t a\ninclude t\n",                                    // itself
           "base t a\ninclude nothing\n",
           "base t a\ncomponent c\nuse nothing x y\n",
       }) {
    NameTable table;
    const Status status = read(bad, &table);
    EXPECT_EQ(status.code(), StatusCode::kInternal) << bad;
    EXPECT_NE(status.message().find(".names"), std::string::npos) << status.message();
  }
}

TEST(NameTable, EveryTableOfTheLibraryIsRead) {
  std::vector<std::string> bases;
  for (const NameTable& table : name_tables()) bases.push_back(table.base);
  EXPECT_EQ(bases, (std::vector<std::string>{"sd15", "sd2", "sdxl", "flux", "sd3", "sd35-medium",
                                             "sd35-large"}));
}

// Numbers of layers that kohya's networks train: D.1 of the sources' own counts.
TEST(NameTable, HasAsManyLayersAsTheModels) {
  const auto linear = [](const char* base, const char* component) {
    std::set<std::string> layers;
    for (const AdapterName& n : adapter_names(base)) {
      if (n.component == component && n.kind == "linear" &&
          n.native.find("embed") == std::string::npos &&
          n.native.find("_layer") == std::string::npos)
        layers.insert(n.native);
    }
    return layers.size();
  };
  EXPECT_EQ(linear("sd15", "text_encoder"), 72U);
  EXPECT_EQ(linear("sdxl", "text_encoder"), 72U);
  EXPECT_EQ(linear("flux", "text_encoder_2"), 168U);
}

TEST(NameTable, RowsOfEverySpellingAreRowsOfItsLayer) {
  for (const NameTable& table : name_tables()) {
    for (const AdapterName& n : adapter_names(table.base)) {
      ASSERT_GT(n.rows, 0) << n.spelled;
      ASSERT_GE(n.row, 0) << n.spelled;
      ASSERT_LE(n.native_row + n.rows, n.out) << n.spelled;
    }
  }
}

}  // namespace
}  // namespace loraaccel::test
