#include <weir/node/fronts/redis/redis_commands.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <weir/limits/bounds.h>
#include <weir/node/fronts/redis/resp_parser.h>
#include <weir/node/fronts/redis/resp_text.h>
#include <weir/node/version.h>

namespace weir::node {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::string_view kWrongPass = "WRONGPASS the password is no token that is known here";
constexpr std::string_view kNoInteger = "ERR value is not an integer or out of range";
constexpr std::string_view kSyntax = "ERR syntax error";
constexpr std::size_t kMaxConnectionName = 128;
constexpr std::size_t kMaxShown = 64;  // bytes of a client's word in an error

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

/// `word` is in lower case.
bool is(std::string_view text, std::string_view word) {
  return text.size() == word.size() && std::equal(text.begin(), text.end(), word.begin(),
                                                  [](char a, char b) { return lower(a) == b; });
}

/// As Redis reads one: digits, with a minus before them; no plus, no leading zero.
std::optional<std::int64_t> integer(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  const std::string_view digits = text.substr(text.starts_with('-') ? 1 : 0);
  if ((digits.size() > 1 && digits[0] == '0') || text == "-0") return std::nullopt;
  return value;
}

/// A whole number of `unit`s as a length, or nothing if it is no length of 1 or more.
std::optional<Nanos> length(std::string_view text, Nanos unit) {
  const std::optional<std::int64_t> count = integer(text);
  if (!count || *count < 1 || *count > kMost / unit) return std::nullopt;
  return *count * unit;
}

bool fits(std::string_view key, RedisBatch& batch) {
  if (key.size() <= kMaxEntryText) return true;
  append_resp_error(batch.tell(), fmt::format("ERR a key has at most {} bytes", kMaxEntryText));
  return false;
}

void append_pair(rpc::Output& out, std::string_view key, std::string_view value) {
  append_resp_bulk(out, key);
  append_resp_bulk(out, value);
}

}  // namespace

struct RedisCommands::Command {
  std::string_view name;  // in lower case
  std::size_t least;      // arguments, the name included
  std::size_t most;
  void (RedisCommands::*run)(Arguments, RedisBatch&);
  enum Kind { plain, immediate, not_queued } kind = plain;
};

// In the order in which they are looked for. `immediate` ones have their effect inside MULTI, too;
// `not_queued` ones are refused there.
const RedisCommands::Command RedisCommands::kCommands[] = {
    {"cl.throttle", 5, 6, &RedisCommands::throttle},
    {"incr", 2, 2, &RedisCommands::increment},
    {"incrby", 3, 3, &RedisCommands::increment},
    {"expire", 3, 4, &RedisCommands::expire},
    {"pexpire", 3, 4, &RedisCommands::expire},
    {"ttl", 2, 2, &RedisCommands::look},
    {"pttl", 2, 2, &RedisCommands::look},
    {"get", 2, 2, &RedisCommands::look},
    {"set", 3, 8, &RedisCommands::set},
    {"del", 2, kMaxRespArguments, &RedisCommands::keys},
    {"exists", 2, kMaxRespArguments, &RedisCommands::keys},
    {"decr", 2, 2, &RedisCommands::decrement},
    {"decrby", 3, 3, &RedisCommands::decrement},
    {"ping", 1, 2, &RedisCommands::ping},
    {"multi", 1, 1, &RedisCommands::multi, Command::immediate},
    {"exec", 1, 1, &RedisCommands::exec, Command::immediate},
    {"discard", 1, 1, &RedisCommands::discard, Command::immediate},
    {"watch", 2, kMaxRespArguments, &RedisCommands::watch, Command::not_queued},
    {"unwatch", 1, 1, &RedisCommands::watch},
    {"echo", 2, 2, &RedisCommands::echo},
    {"quit", 1, 1, &RedisCommands::quit, Command::immediate},
    {"reset", 1, 1, &RedisCommands::reset, Command::immediate},
    {"hello", 1, 7, &RedisCommands::hello, Command::not_queued},
    {"auth", 2, 3, &RedisCommands::auth, Command::not_queued},
    {"select", 2, 2, &RedisCommands::select},
    {"client", 2, kMaxRespArguments, &RedisCommands::client},
    {"command", 1, kMaxRespArguments, &RedisCommands::command},
    {"info", 1, kMaxRespArguments, &RedisCommands::info},
    {"config", 2, kMaxRespArguments, &RedisCommands::config},
    {"eval", 1, kMaxRespArguments, &RedisCommands::script},
    {"eval_ro", 1, kMaxRespArguments, &RedisCommands::script},
    {"evalsha", 1, kMaxRespArguments, &RedisCommands::script},
    {"evalsha_ro", 1, kMaxRespArguments, &RedisCommands::script},
    {"script", 1, kMaxRespArguments, &RedisCommands::script},
    {"fcall", 1, kMaxRespArguments, &RedisCommands::script},
    {"post", 1, kMaxRespArguments, &RedisCommands::forged, Command::immediate},
    {"host:", 1, kMaxRespArguments, &RedisCommands::forged, Command::immediate},
};

const RedisCommands::Command* RedisCommands::find(std::string_view name) {
  for (const Command& command : kCommands) {
    if (is(name, command.name)) return &command;
  }
  return nullptr;
}

bool RedisCommands::changes_caller(std::string_view name) {
  return is(name, "auth") || is(name, "hello") || is(name, "reset");
}

void RedisCommands::run(Arguments a, RedisBatch& batch) {
  const Command* command = find(a[0]);
  if (queuing_ && (command == nullptr || command->kind != Command::immediate)) {
    return queue(a, command, batch);
  }
  if (command == nullptr) {
    append_resp_error(
        batch.tell(),
        fmt::format(
            "ERR unknown command '{}': weir limits rates, and stores nothing else. It knows "
            "CL.THROTTLE, and INCR, INCRBY, DECR, DECRBY, GET, SET … NX EX, EXPIRE, TTL, "
            "EXISTS, DEL of keys that a rule limits",
            a[0].substr(0, kMaxShown)));
  } else if (a.size() < command->least || a.size() > command->most) {
    append_resp_error(batch.tell(),
                      fmt::format("ERR wrong number of arguments for '{}' command", command->name));
  } else {
    (this->*command->run)(a, batch);
  }
}

// --- Transactions ---

void RedisCommands::leave_transaction() {
  queuing_ = spoilt_ = false;
  queued_.clear();
  queued_bytes_ = 0;
}

/// A command inside MULTI: kept, or refused at once, and then EXEC refuses all.
void RedisCommands::queue(Arguments a, const Command* command, RedisBatch& batch) {
  rpc::Output& out = batch.tell();
  std::size_t bytes = 0;
  for (const std::string_view argument : a) bytes += argument.size();
  const bool before = std::exchange(spoilt_, true);  // unless all is well
  if (command == nullptr) {
    return append_resp_error(out,
                             fmt::format("ERR unknown command '{}'", a[0].substr(0, kMaxShown)));
  }
  if (command->kind == Command::not_queued) {
    return append_resp_error(out, fmt::format("ERR '{}' is not allowed in MULTI", command->name));
  }
  if (a.size() < command->least || a.size() > command->most) {
    return append_resp_error(
        out, fmt::format("ERR wrong number of arguments for '{}' command", command->name));
  }
  if (queued_.size() == kMaxRedisQueued || queued_bytes_ + bytes > kMaxRedisQueuedBytes) {
    return append_resp_error(out, "ERR a transaction has at most 1024 commands of 64 KiB in all");
  }
  spoilt_ = before;
  queued_bytes_ += bytes;
  queued_.emplace_back(a.begin(), a.end());
  append_resp_simple(out, "QUEUED");
}

void RedisCommands::multi(Arguments, RedisBatch& batch) {
  if (queuing_) return append_resp_error(batch.tell(), "ERR MULTI calls can not be nested");
  queuing_ = true;
  append_resp_simple(batch.tell(), "OK");
}

/// Each of its commands is decided on its own, in order, and those of others may come in between.
void RedisCommands::exec(Arguments, RedisBatch& batch) {
  if (!queuing_) return append_resp_error(batch.tell(), "ERR EXEC without MULTI");
  const bool spoilt = spoilt_;
  std::vector<std::vector<std::string>> commands = std::move(queued_);
  leave_transaction();
  if (spoilt) {
    return append_resp_error(batch.tell(),
                             "EXECABORT Transaction discarded because of previous errors.");
  }
  append_resp_array(batch.tell(), commands.size());
  for (std::vector<std::string>& words : commands) {
    batch.kept.push_back(std::move(words));
    const std::vector<std::string>& kept = batch.kept.back();
    run(std::vector<std::string_view>(kept.begin(), kept.end()), batch);
  }
}

void RedisCommands::discard(Arguments, RedisBatch& batch) {
  if (!queuing_) return append_resp_error(batch.tell(), "ERR DISCARD without MULTI");
  leave_transaction();
  append_resp_simple(batch.tell(), "OK");
}

void RedisCommands::watch(Arguments a, RedisBatch& batch) {
  if (is(a[0], "unwatch")) return append_resp_simple(batch.tell(), "OK");
  append_resp_error(batch.tell(),
                    "ERR weir does not watch keys: CL.THROTTLE and INCR decide and count at once");
}

// --- Limits ---

void RedisCommands::throttle(Arguments a, RedisBatch& batch) {
  const std::optional<std::int64_t> burst = integer(a[2]);
  const std::optional<std::int64_t> count = integer(a[3]);
  const std::optional<Nanos> period = length(a[4], kSecond);
  const std::optional<std::int64_t> quantity = a.size() > 5 ? integer(a[5]) : 1;
  if (!burst || *burst < 0 || *burst == kMost) {
    return append_resp_error(batch.tell(), "ERR max_burst: expected an integer of 0 or more");
  }
  if (!count || *count < 1) {
    return append_resp_error(batch.tell(), "ERR count: expected an integer of 1 or more");
  }
  if (!period) {
    return append_resp_error(batch.tell(),
                             "ERR period: expected seconds as an integer of 1 or more");
  }
  if (!quantity || *quantity < 0) {
    return append_resp_error(batch.tell(), "ERR quantity: expected an integer of 0 or more");
  }
  if (!fits(a[1], batch)) return;
  batch.begin(RedisAnswer::throttle, resp3_);
  batch.ask(domain_, a[1], static_cast<std::uint64_t>(*quantity), RequestKind::check,
            {static_cast<std::uint64_t>(*count), *period, static_cast<std::uint64_t>(*burst) + 1});
}

/// A negative number gives back.
void RedisCommands::increment(Arguments a, RedisBatch& batch) {
  const std::optional<std::int64_t> by = a.size() > 2 ? integer(a[2]) : 1;
  if (!by || *by == std::numeric_limits<std::int64_t>::min()) {
    return append_resp_error(batch.tell(), kNoInteger);
  }
  if (!fits(a[1], batch)) return;
  const auto hits = static_cast<std::uint64_t>(*by < 0 ? -*by : *by);
  batch.begin(RedisAnswer::count, resp3_).number = hits;
  batch.ask(domain_, a[1], hits, *by < 0 ? RequestKind::refund : RequestKind::check);
}

void RedisCommands::decrement(Arguments a, RedisBatch& batch) {
  const std::optional<std::int64_t> by = a.size() > 2 ? integer(a[2]) : 1;
  if (!by || *by < 0) {
    return append_resp_error(batch.tell(), "ERR decrement: expected an integer of 0 or more");
  }
  if (!fits(a[1], batch)) return;
  batch.begin(RedisAnswer::count, resp3_);
  batch.ask(domain_, a[1], static_cast<std::uint64_t>(*by), RequestKind::refund);
}

void RedisCommands::look(Arguments a, RedisBatch& batch) {
  if (!fits(a[1], batch)) return;
  batch.begin(is(a[0], "get")   ? RedisAnswer::value
              : is(a[0], "ttl") ? RedisAnswer::ttl
                                : RedisAnswer::pttl,
              resp3_);
  batch.ask(domain_, a[1], 0);
}

void RedisCommands::expire(Arguments a, RedisBatch& batch) {
  const std::optional<Nanos> window = length(a[2], is(a[0], "expire") ? kSecond : kMillisecond);
  if (!window) {
    return append_resp_error(
        batch.tell(), "ERR expected the length of the rule's window; DEL gives a count back");
  }
  const bool only_without = a.size() > 3 && is(a[3], "nx");
  if (a.size() > 3 && !only_without && !is(a[3], "xx")) {
    return append_resp_error(batch.tell(), "ERR of the options of EXPIRE only NX and XX are known");
  }
  if (!fits(a[1], batch)) return;
  RedisCall& call = batch.begin(RedisAnswer::expire, resp3_);
  call.window = *window;
  call.number = only_without ? 0 : 1;  // a count has an end from its first hit on
  batch.ask(domain_, a[1], 0);
}

void RedisCommands::set(Arguments a, RedisBatch& batch) {
  bool only_new = false;
  std::optional<Nanos> window;
  for (std::size_t i = 3; i < a.size(); ++i) {
    if (is(a[i], "nx") && !only_new) {
      only_new = true;
    } else if ((is(a[i], "ex") || is(a[i], "px")) && !window && i + 1 < a.size()) {
      window = length(a[i + 1], is(a[i], "ex") ? kSecond : kMillisecond);
      if (!window)
        return append_resp_error(batch.tell(), "ERR invalid expire time in 'set' command");
      ++i;
    } else {
      return append_resp_error(batch.tell(),
                               "ERR of SET only SET key value NX EX seconds (or PX ms) is known");
    }
  }
  if (!only_new || !window) {
    return append_resp_error(batch.tell(),
                             "ERR SET needs NX and EX or PX: weir keeps counts, no values");
  }
  if (!fits(a[1], batch)) return;
  const bool peek = a[2] == "0";
  batch.begin(peek ? RedisAnswer::set_peek : RedisAnswer::set, resp3_).window = *window;
  batch.ask(domain_, a[1], peek ? 0 : 1);
}

void RedisCommands::keys(Arguments a, RedisBatch& batch) {
  for (const std::string_view key : a.subspan(1)) {
    if (!fits(key, batch)) return;
  }
  const bool exists = is(a[0], "exists");
  batch.begin(exists ? RedisAnswer::exists : RedisAnswer::given_back, resp3_);
  for (const std::string_view key : a.subspan(1)) {
    if (exists) {
      batch.ask(domain_, key, 0);
    } else {
      batch.ask(domain_, key, kMost, RequestKind::refund);
    }
  }
}

// --- The connection ---

void RedisCommands::ping(Arguments a, RedisBatch& batch) {
  if (a.size() > 1) return append_resp_bulk(batch.tell(), a[1]);
  append_resp_simple(batch.tell(), "PONG");
}

void RedisCommands::echo(Arguments a, RedisBatch& batch) {
  append_resp_bulk(batch.tell(), a[1]);
}

void RedisCommands::quit(Arguments, RedisBatch& batch) {
  ends_ = true;
  append_resp_simple(batch.tell(), "OK");
}

void RedisCommands::reset(Arguments, RedisBatch& batch) {
  leave_transaction();
  resp3_ = false;
  name_.clear();
  authenticate_(std::nullopt);
  append_resp_simple(batch.tell(), "RESET");
}

/// A page of a browser, or another server's client: what follows is not for this port.
void RedisCommands::forged(Arguments, RedisBatch& batch) {
  ends_ = true;
  append_resp_error(batch.tell(), "ERR this port speaks Redis' protocol, not HTTP");
}

bool RedisCommands::authenticate(std::string_view token, rpc::Output& out) {
  if (!token.empty() && authenticate_(token)) return true;
  append_resp_error(out, kWrongPass);
  return false;
}

/// The user's name says nothing: a token has a name of its own.
void RedisCommands::auth(Arguments a, RedisBatch& batch) {
  rpc::Output& out = batch.tell();
  if (authenticate(a.back(), out)) append_resp_simple(out, "OK");
}

void RedisCommands::hello(Arguments a, RedisBatch& batch) {
  rpc::Output& out = batch.tell();
  bool resp3 = resp3_;
  if (a.size() > 1) {
    if (a[1] != "2" && a[1] != "3") {
      return append_resp_error(out, "NOPROTO unsupported protocol version");
    }
    resp3 = a[1] == "3";
  }
  std::string_view name = name_;
  std::optional<std::string_view> token;
  for (std::size_t i = 2; i < a.size();) {
    if (is(a[i], "auth") && i + 2 < a.size() && !token) {
      token = a[i + 2];
      i += 3;
    } else if (is(a[i], "setname") && i + 1 < a.size() && a[i + 1].size() <= kMaxConnectionName) {
      name = a[i + 1];
      i += 2;
    } else {
      return append_resp_error(out, kSyntax);
    }
  }
  if (token && !authenticate(*token, out)) return;
  resp3_ = resp3;
  if (name.data() != name_.data()) name_ = name;
  append_resp_map(out, 7, resp3_);
  append_pair(out, "server", "weir");
  append_pair(out, "version", kVersion);
  append_resp_bulk(out, "proto");
  append_resp_integer(out, resp3_ ? 3 : 2);
  append_resp_bulk(out, "id");
  append_resp_integer(out, id_);
  append_pair(out, "mode", "standalone");
  append_pair(out, "role", "master");
  append_resp_bulk(out, "modules");
  append_resp_array(out, 0);
}

void RedisCommands::select(Arguments a, RedisBatch& batch) {
  if (a[1] == "0") return append_resp_simple(batch.tell(), "OK");
  append_resp_error(batch.tell(), "ERR DB index is out of range: there is database 0 only");
}

void RedisCommands::client(Arguments a, RedisBatch& batch) {
  rpc::Output& out = batch.tell();
  if (is(a[1], "setname") && a.size() == 3) {
    if (a[2].size() > kMaxConnectionName) return append_resp_error(out, kSyntax);
    name_ = a[2];
    return append_resp_simple(out, "OK");
  }
  if (is(a[1], "getname") && a.size() == 2) {
    return name_.empty() ? append_resp_nil(out, resp3_) : append_resp_bulk(out, name_);
  }
  if (is(a[1], "id") && a.size() == 2) return append_resp_integer(out, id_);
  if ((is(a[1], "setinfo") && a.size() == 4) ||
      ((is(a[1], "no-evict") || is(a[1], "no-touch")) && a.size() == 3)) {
    return append_resp_simple(out, "OK");
  }
  append_resp_error(
      out, fmt::format("ERR unknown subcommand '{}' of CLIENT", a[1].substr(0, kMaxShown)));
}

/// Nothing is told of commands: clients then take them as they come.
void RedisCommands::command(Arguments a, RedisBatch& batch) {
  if (a.size() == 2 && is(a[1], "count")) {
    return append_resp_integer(batch.tell(), std::size(kCommands));
  }
  if (a.size() > 1 && is(a[1], "docs")) return append_resp_map(batch.tell(), 0, resp3_);
  append_resp_array(batch.tell(), 0);
}

/// What clients look for: a version, and that nothing is being loaded.
void RedisCommands::info(Arguments, RedisBatch& batch) {
  append_resp_bulk(batch.tell(), fmt::format("# Server\r\nserver_name:weir\r\nweir_version:{}\r\n"
                                             "redis_version:7.0.0\r\nredis_mode:standalone\r\n"
                                             "\r\n# Persistence\r\nloading:0\r\n"
                                             "\r\n# Replication\r\nrole:master\r\n",
                                             kVersion));
}

/// The two that redis-benchmark asks for; there are no others.
void RedisCommands::config(Arguments a, RedisBatch& batch) {
  rpc::Output& out = batch.tell();
  if (!is(a[1], "get")) {
    return append_resp_error(out, "ERR weir is configured by files (docs/configuration.md)");
  }
  if (a.size() == 3 && is(a[2], "save")) {
    append_resp_map(out, 1, resp3_);
    return append_pair(out, "save", "");
  }
  if (a.size() == 3 && is(a[2], "appendonly")) {
    append_resp_map(out, 1, resp3_);
    return append_pair(out, "appendonly", "no");
  }
  append_resp_map(out, 0, resp3_);
}

void RedisCommands::script(Arguments, RedisBatch& batch) {
  append_resp_error(batch.tell(),
                    "ERR weir runs no scripts: use CL.THROTTLE key max_burst count period, or INCR "
                    "and EXPIRE on a key that a rule limits (docs/redis.md)");
}

}  // namespace weir::node
