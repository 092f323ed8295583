#pragma once

// For programs that read their options with CLI11. Not installed.

#include <CLI/CLI.hpp>

#include <string>

#include <weir/limits/text/number.h>

namespace weir {

/// Has every option of `app` and its subcommands that is a number be one as parse_number() has it,
/// with a fraction where it may have one: CLI11 itself takes -1 for 2^64 - 1, 010 for 8 and nothing
/// for 0. Call it once all options are there, before they are parsed.
inline void strict_numbers(CLI::App& app) {
  const auto wrong = [](const std::string& text, bool fraction) {
    std::uint64_t number = 0;
    const std::size_t point = fraction ? text.find('.') : std::string::npos;
    const Digits whole = parse_number(text.substr(0, point), number);
    if (whole == Digits::too_many) return "expected a number below 2^64, got \"" + text + "\"";
    const bool rest =
        point == std::string::npos ||
        (point + 1 < text.size() && text.find_first_not_of("0123456789", point + 1) == text.npos);
    if (whole == Digits::good && rest) return std::string();
    return std::string(fraction ? "expected a number such as 0.5" : "expected a whole number") +
           " in decimal digits, got \"" + text + "\"";
  };
  for (CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    const std::string type = option->get_type_name();
    const bool fraction = type.starts_with("FLOAT");
    if (!fraction && !type.starts_with("UINT") && !type.starts_with("INT")) continue;
    // The first one, so that it is what complains.
    option->check([wrong, fraction](const std::string& text) { return wrong(text, fraction); });
  }
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    strict_numbers(*command);
  }
}

}  // namespace weir
