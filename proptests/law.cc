#include "law.h"

#include <gtest/gtest.h>
#include <rapidcheck/detail/Configuration.h>
#include <rapidcheck/detail/TestListenerAdapter.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace weir::laws {
namespace {

constexpr int kDefaultCases = 200;
constexpr int kCasesForClasses = 100;

/// The law that is running: GoogleTest runs one at a time.
struct Run {
  const Law* law = nullptr;
  std::set<std::string, std::less<>> now;  // coverage classes of this case
  std::map<std::string, int, std::less<>> classes;
  int cases = 0;
};
Run current;

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

rc::detail::TestParams params_for(const Law& law) {
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  std::string given = environment("RC_PARAMS");
  if (given.find("max_success") == std::string::npos) {
    int cases = std::atoi(environment("WEIR_CASES"));
    params.maxSuccess = cases > 0 ? cases : kDefaultCases;
  }
  std::string seed = environment("WEIR_SEED");
  if (seed.empty() && given.find("seed") == std::string::npos) {
    params.seed = 20240 + static_cast<std::uint64_t>(law.number);
  } else if (!seed.empty() && seed != "random") {
    params.seed = std::strtoull(seed.c_str(), nullptr, 10);
  }
  return params;
}

std::string test_name(const Law& law) {
  char number[16];
  std::snprintf(number, sizeof number, "Law%02d_", law.number);
  std::string name = number;
  for (char c : law.statement) {
    bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (plain || name.back() != '_') name += plain ? c : '_';
  }
  return name;
}

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

void record(const Law& law) {
  std::string path = environment("WEIR_SPEC_OUT");
  if (path.empty()) return;
  std::ostringstream line;
  line << "{\"law\":" << law.number << ",\"name\":" << json_text(law.statement)
       << ",\"cases\":" << current.cases << ",\"classes\":{";
  const char* comma = "";
  for (const auto& [name, count] : current.classes) {
    line << comma << json_text(name) << ":" << count;
    comma = ",";
  }
  line << "}}\n";
  std::ofstream out(path, std::ios::app);
  out << line.str() << std::flush;
  if (!out) ADD_FAILURE() << "cannot write " << path;
}

void run(const Law& law, void (*body)()) {
  current = Run{};
  current.law = &law;
  for (const std::string& name : law.classes) current.classes[name] = 0;
  auto property = [body] {
    current.now.clear();
    body();
    ++current.cases;
    for (const std::string& name : current.now) ++current.classes[name];
  };
  rc::detail::TestMetadata metadata;
  metadata.id = "Laws/" + test_name(law);
  metadata.description = law.statement;
  rc::detail::TestListenerAdapter listener;
  auto result =
      rc::detail::checkProperty(rc::detail::toProperty(property), metadata, params_for(law),
                                listener, rc::detail::configuration().reproduce);
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  if (!result.is<rc::detail::SuccessResult>()) {
    if (result.is<rc::detail::FailureResult>()) {
      rc::detail::Configuration again;
      again.testParams = rc::detail::configuration().testParams;
      again.reproduce.emplace(metadata.id, result.get<rc::detail::FailureResult>().reproduce);
      text << "\nAgain: RC_PARAMS=\"" << rc::detail::configToMinimalString(again) << "\" "
           << "--gtest_filter='Laws." << test_name(law) << "'\n";
    }
    ADD_FAILURE() << "law " << law.number << ", " << law.statement << "\n" << text.str();
    return;
  }
  std::cout << "  " << current.cases << " cases\n";
  for (const auto& [name, count] : current.classes) {
    std::cout << "  " << count << " reached: " << name << "\n";
    if (current.cases >= kCasesForClasses && count == 0) {
      ADD_FAILURE() << "law " << law.number << ": no case reached \"" << name << '"';
    }
  }
  if (!::testing::Test::HasFailure()) record(law);
}

class LawTest : public ::testing::Test {
 public:
  LawTest(const Law& law, void (*body)()) : law_(law), body_(body) {}
  void TestBody() override { run(law_, body_); }

 private:
  Law law_;
  void (*body_)();
};

}  // namespace

bool add_law(Law law, void (*body)()) {
  std::string name = test_name(law);
  ::testing::RegisterTest("Laws", name.c_str(), nullptr, nullptr, law.file, law.line,
                          [law, body]() -> ::testing::Test* { return new LawTest(law, body); });
  return true;
}

void reached(std::string_view name, bool really) {
  if (!current.classes.contains(name)) {
    throw std::logic_error("the law does not list the coverage class " + std::string(name));
  }
  if (really) current.now.emplace(name);
}

}  // namespace weir::laws
