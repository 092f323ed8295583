#pragma once

#include <rapidcheck.h>

#include <string>
#include <string_view>
#include <vector>

namespace weir::laws {

/// One law of the specification, as a property.
struct Law {
  int number = 0;
  std::string statement;
  std::vector<std::string> classes;  ///< classes of inputs that the cases must reach
  const char* file = "";
  int line = 0;
};

/// Registers `body` as the GoogleTest "Laws.LawNN_<statement>". Each run of it is one case: it
/// draws its inputs with `*generator` and asserts with RC_ASSERT. WEIR_CASES sets how many cases
/// (200), WEIR_SEED from which seed (a number or `random`; pinned by default).
///
/// A coverage class that no case reached fails the law, so that a generator cannot quietly stop
/// testing what matters. (Not checked below 100 cases.)
///
/// If the environment variable WEIR_SPEC_OUT names a file, a law that held appends one JSON line:
/// {"law":17,"name":"…","cases":200,"classes":{"…":31}}.
bool add_law(Law law, void (*body)());

/// Says that the current case reached a coverage class of the law that is running.
void reached(std::string_view name, bool really = true);

}  // namespace weir::laws

#define WEIR_LAW_PASTE2(a, b) a##b
#define WEIR_LAW_PASTE(a, b) WEIR_LAW_PASTE2(a, b)

/// LAW(17, "with one writer a bucket equals an exact token bucket", "a denied cost") { … }
#define LAW(number, statement, ...)                                                 \
  static void WEIR_LAW_PASTE(law_body_, __LINE__)();                                \
  [[maybe_unused]] static const bool WEIR_LAW_PASTE(law_added_, __LINE__) =         \
      ::weir::laws::add_law({number, statement, {__VA_ARGS__}, __FILE__, __LINE__}, \
                            &WEIR_LAW_PASTE(law_body_, __LINE__));                  \
  static void WEIR_LAW_PASTE(law_body_, __LINE__)()
