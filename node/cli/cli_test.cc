// Runs the program `weir` as a user does: output, errors and exit codes.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>

#include <weir/node/fronts/capnp/capnp_front.h>
#include <weir/node/fronts/capnp/test_service.h>
#include <weir/rpc/net/event_loop.h>

namespace weir::node {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct Result {
  int exit = -1;
  std::string out;  // standard output and standard error
};

// `arguments` in the shell's syntax.
Result weir(const std::string& arguments, const std::string& input = "") {
  const std::string command = fmt::format("'{}' {} 2>&1{}", WEIR_PROGRAM, arguments, input);
  Result result;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> chunk;
  for (std::size_t got = 0; (got = std::fread(chunk.data(), 1, chunk.size(), pipe)) > 0;) {
    result.out.append(chunk.data(), got);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.exit = WEXITSTATUS(status);
  return result;
}

class Cli : public testing::Test {
 protected:
  Cli() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weir-cli-XXXXXX").string();
    if (mkdtemp(pattern.data()) != nullptr) dir_ = pattern;
  }
  ~Cli() override {
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  void SetUp() override { ASSERT_FALSE(dir_.empty()); }

  std::string file(const std::string& name, const std::string& text) {
    const std::string path = dir_ + "/" + name;
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  std::string good_rules() {
    return file("good.yaml",
                "domain: site\nrules:\n  - { name: per-ip, key: ip, limit: 1, window: 1m }\n");
  }
  std::string two_domains() {
    return file("two.yaml",
                "domain: one\nrules:\n  - { name: a, limit: 1, window: 1m }\n---\n"
                "domain: two\nrules:\n  - { name: b, limit: 2, window: 1m }\n");
  }
  std::string log() {
    std::string text = "not a line\n";
    for (int i = 0; i < 3; ++i) {
      text += "192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"x\"\n";
    }
    return file("access.log", text);
  }

  std::string dir_;
};

TEST_F(Cli, HelpHasAnExampleForEveryCommand) {
  for (const std::string command :
       {"", "replay", "check", "reserve", "settle", "status", "validate"}) {
    const Result result = weir(command + " --help");
    EXPECT_EQ(result.exit, 0) << command;
    EXPECT_THAT(result.out, HasSubstr("Example:\n  weir " + command));
  }
  EXPECT_THAT(weir("--version").out, testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST_F(Cli, WrongUsageIsExitTwo) {
  for (const std::string arguments :
       {"", "nonsense", "replay", "check", "replay --rules x --regions 0 y",
        "replay --rules x --regions 65 y", "replay --rules x --spread city y",
        "replay --rules x --sync-interval 250 y", "status --interval 0s",
        "check --domain api --hits -1 a=b", "check --domain api novalue", "check --domain api =v",
        "reserve --domain api a=b", "reserve --domain api --hits 1 novalue", "settle",
        "settle ticket", "check --domain api --count 0 a=b"}) {
    const Result result = weir(arguments);
    EXPECT_EQ(result.exit, 2) << arguments << "\n" << result.out;
    EXPECT_FALSE(result.out.empty()) << arguments;
  }
}

TEST_F(Cli, NumbersAreReadAsInYaml) {
  for (const char* text : {"-1", "''", "010", "0x5", "5k", "1.5", "+1", "18446744073709551616"}) {
    for (const char* command : {"settle t@127.0.0.1:1 --hits", "reserve --domain api a=b --hits",
                                "check --domain api a=b --hits", "check --domain api a=b --count",
                                "replay log --rules r --regions", "replay log --rules r --top"}) {
      const Result result = weir(fmt::format("{} {}", command, text));
      EXPECT_EQ(result.exit, 2) << command << " " << text;
      EXPECT_THAT(result.out, testing::AnyOf(HasSubstr("expected a "), HasSubstr("not in range")))
          << command << " " << text;
    }
  }
}

TEST_F(Cli, Validate) {
  const Result good = weir("validate " + good_rules() + " " + two_domains());
  EXPECT_EQ(good.exit, 0);
  EXPECT_EQ(good.out, "ok\n");
  const std::string bad = file("bad.yaml",
                               "domain: site\nrules:\n  - name: a\n    limit: -1\n    window: 1m\n"
                               "  - name: b\n    limit: 1\n    windw: 1m\n");
  const Result result = weir("validate " + good_rules() + " " + bad);
  EXPECT_EQ(result.exit, 2);
  EXPECT_THAT(result.out, AllOf(HasSubstr(bad + ":4:12: rules[0].limit: "),
                                HasSubstr(bad + ":8:5: rules[1].windw: ")));
  EXPECT_THAT(result.out, testing::Not(HasSubstr("ok\n")));
  EXPECT_EQ(weir("validate " + dir_ + "/none.yaml").exit, 2);
}

TEST_F(Cli, CertsMakesACaAndWhatItIssues) {
  const std::string at = " --dir " + dir_ + "/certs ";
  const std::string file = dir_ + "/certs/";
  EXPECT_EQ(weir("certs ca" + at).out, file + "ca.pem\n");
  EXPECT_EQ(weir("certs node --cluster demo --region eu --node eu-1 --san node.example" + at).out,
            file + "eu-1.pem\n");
  EXPECT_EQ(weir("certs client --name web" + at).out, file + "web.pem\n");
  EXPECT_EQ(weir("certs revoke --name web" + at).out, file + "crl.pem\n");
  EXPECT_EQ(weir("certs revoke" + at).exit, 0);
  using std::filesystem::perms;
  const auto mode = [&](const std::string& name) {
    return std::filesystem::status(file + name).permissions() & perms::all;
  };
  EXPECT_EQ(mode(""), perms::owner_all);
  for (const char* key : {"ca.key", "eu-1.key", "web.key"}) {
    EXPECT_EQ(mode(key), perms::owner_read | perms::owner_write) << key;
  }

  EXPECT_EQ(weir("certs ca" + at).out, "weir: " + file + "ca.pem: is there already\n");
  Result again = weir("certs client --name web" + at);
  EXPECT_EQ(again.out, "weir: " + file + "web.key: is there already\n");
  EXPECT_EQ(again.exit, 2);
  EXPECT_EQ(weir("certs client --name web --replace" + at).exit, 0);
  for (const char* name : {"../x", "ca", "crl", ".x", "''"}) {
    EXPECT_EQ(weir(fmt::format("certs client --name {}{}", name, at)).exit, 2) << name;
  }
  EXPECT_THAT(weir("certs client --name x --dir " + dir_).out, HasSubstr("ca.pem: No such file"));
}

TEST_F(Cli, TlsOptionsThatAreWrongAreSaid) {
  EXPECT_EQ(weir("check --domain api --cert x").out, "weir: expected --cert and --key together\n");
  EXPECT_EQ(weir("status --ca " + dir_ + "/none").out,
            "weir: " + dir_ + "/none: No such file or directory\n");
}

TEST_F(Cli, ValidateWarnsOfWhatIsHardlyMeant) {
  const std::string rules =
      file("rules.yaml",
           "domain: site\nrules:\n"
           "  - { name: a, limit: 1, window: 1m, algorithm: sliding_window }\n"
           "  - { name: b, limit: 9, window: 1m, algorithm: sliding_window }\n"
           "  - { name: c, limit: 10, window: 1m, algorithm: sliding_window }\n"
           "  - { name: d, limit: 50, window: 1m, algorithm: sliding_window, "
           "strict: true }\n"
           "  - { name: e, limit: 1, window: 1m, algorithm: sliding_window, "
           "strict: true, slots: 15 }\n"
           "  - { name: f, limit: 1, window: 1m, algorithm: sliding_log }\n");
  const Result result = weir("validate " + rules);
  EXPECT_EQ(result.exit, 0);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr(rules + ":3:23: rules[0].limit: warning: "),
                    HasSubstr("gets half of this limit: take algorithm: sliding_log"),
                    HasSubstr(rules + ":4:23: rules[1].limit: warning: "),
                    HasSubstr("gets 8 of 9 of this limit"), HasSubstr("rules[3].strict: warning: "),
                    testing::EndsWith("ok\n")));
  for (const char* other : {"rules[2]", "rules[4]", "rules[5]"}) {
    EXPECT_THAT(result.out, testing::Not(HasSubstr(other)));
  }
}

TEST_F(Cli, ReplayPrintsTextAndJson) {
  const Result text = weir("replay --rules " + good_rules() + " " + log());
  EXPECT_EQ(text.exit, 0);
  EXPECT_THAT(text.out, AllOf(HasSubstr("3 requests"), HasSubstr("1 malformed line\n  line 1: "),
                              HasSubstr("192.0.2.1")));
  const Result json =
      weir("replay --rules " + good_rules() + " --json --regions 2 --spread request " + log());
  ASSERT_EQ(json.exit, 0) << json.out;
  const auto report = nlohmann::json::parse(json.out);
  EXPECT_EQ(report["requests"], 3);
  EXPECT_EQ(report["malformed"], 1);
  EXPECT_EQ(report["rules"][0]["allowed"], 2);
  EXPECT_EQ(report["rules"][0]["over_admitted"], 1);
  EXPECT_EQ(report["top_denied"][0]["key"], "192.0.2.1");
}

TEST_F(Cli, ReplayReadsStandardInput) {
  const Result result = weir("replay --rules " + good_rules() + " --json -", " < " + log());
  ASSERT_EQ(result.exit, 0) << result.out;
  EXPECT_EQ(nlohmann::json::parse(result.out)["rules"][0]["denied"], 2);
}

TEST_F(Cli, ReplayChoosesTheDomain) {
  const Result ambiguous = weir("replay --rules " + two_domains() + " " + log());
  EXPECT_EQ(ambiguous.exit, 2);
  EXPECT_THAT(ambiguous.out, HasSubstr("choose one with --domain: one, two\n"));
  const Result unknown = weir("replay --domain three --rules " + two_domains() + " " + log());
  EXPECT_EQ(unknown.exit, 2);
  EXPECT_THAT(unknown.out, HasSubstr("it holds: one, two\n"));
  const Result chosen = weir("replay --json --domain two --rules " + two_domains() + " " + log());
  ASSERT_EQ(chosen.exit, 0) << chosen.out;
  const auto rules = nlohmann::json::parse(chosen.out)["rules"];
  ASSERT_EQ(rules.size(), 1u);
  EXPECT_EQ(rules[0]["name"], "b");
  EXPECT_EQ(rules[0]["denied"], 1);
}

TEST_F(Cli, ReplayErrors) {
  const auto fails = [&](const std::string& rules, const std::string& path, const char* why) {
    const Result result = weir("replay --rules " + rules + " " + path);
    EXPECT_EQ(result.exit, 2);
    EXPECT_THAT(result.out, HasSubstr(why));
  };
  fails(good_rules(), dir_ + "/none.log", "none.log: No such file or directory");
  fails(good_rules(), dir_, ": Is a directory");
  fails(good_rules(), file("empty.log", ""), "empty.log: holds no requests");
  fails(file("none.yaml", "domain: site\nrules: []\n"), log(), "none.yaml: holds no rules");
  const std::string bad = file("bad.yaml", "domain: site\nrules:\n  - name: a\n  - limit: 1\n");
  fails(bad, log(), "rules[0].limit");
  fails(bad, log(), "rules[1].window");
}

TEST_F(Cli, OutputThatIsLostIsAnError) {
  const Result result = weir("replay --rules " + good_rules() + " " + log() + " > /dev/full");
  EXPECT_EQ(result.exit, 2);
}

// Allows up to 5 hits; says nothing about domain "quiet".
class Handler : public node::test::ServiceHandler {
 public:
  kj::Promise<void> check(std::span<const Request> requests, std::span<Reply> replies) override {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Request& request = requests[i];
      Reply& reply = replies[i];
      reply.allowed = request.hits <= 5;
      if (request.domain == "quiet") continue;
      Status status;
      status.rule = "rule-of-" + std::string(request.descriptor[0].value);
      status.limit = 5;
      status.remaining = reply.allowed ? 5 - request.hits : 5;
      status.reset = 90 * kSecond;
      status.allowed = reply.allowed;
      if (!reply.allowed) status.retry_after = request.hits == 6 ? 1500 * kMillisecond : kNever;
      if (request.domain == "leaky") status.delay = 250 * kMillisecond;
      reply.statuses.push_back(status);
      reply.deciding = 0;
      reply.repeated = !request.id.empty() && !ids_.insert(std::string(request.id)).second;
    }
    return kj::READY_NOW;
  }
  kj::Promise<void> reserve(const Request& request, Nanos timeout, ReserveReply& reply) override {
    auto checked = check(std::span(&request, 1), std::span(&reply.decision, 1));
    if (reply.decision.allowed && request.hits > 0) reply.ticket = fmt::format("t{}", timeout);
    return checked;
  }
  kj::Promise<void> settle(std::string_view ticket, std::uint64_t hits,
                           SettleReply& reply) override {
    reply.settled = ticket == "t60000000000";
    reply.reserved = 5;
    reply.lapsed = hits == 0;
    return kj::READY_NOW;
  }
  kj::Promise<void> lease(const Request& request, const LeaseTerms& terms,
                          LeaseReply& reply) override {
    auto checked = check(std::span(&request, 1), std::span(&reply.decision, 1));
    reply.ticket = "lease";
    reply.hits = terms.most;
    reply.term = terms.term;
    return checked;
  }
  std::string status_json() override {
    return R"({"region":"eu","node":"eu-1","rules":[{"domain":"api","name":"per-key","allowed":7}]})";
  }

 private:
  std::set<std::string> ids_;
};

// A node's client port, on a thread of its own.
class Server {
 public:
  Server() {
    std::promise<std::uint16_t> started;
    thread_ = std::thread([this, &started] {
      rpc::EventLoop loop;
      Handler handler;
      node::test::TestService service(handler);
      node::CapnpFront server(loop, service);
      std::string error;
      if (!server.start("127.0.0.1:0", rpc::Sharing::alone, error)) {
        started.set_value(0);
        return;
      }
      loop_ = &loop;
      started.set_value(server.port());
      loop.run();
    });
    port_ = started.get_future().get();
  }
  ~Server() {
    if (port_ != 0) loop_.load()->stop();
    thread_.join();
  }
  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }

 private:
  std::atomic<rpc::EventLoop*> loop_{nullptr};
  std::uint16_t port_ = 0;
  std::thread thread_;
};

// Nobody listens on the port of a server that is gone.
std::string dead_address() {
  return Server().address();
}

constexpr const char* kPatient = " --timeout 20s";

TEST_F(Cli, CheckPrintsTheDecision) {
  Server server;
  const std::string check = "check --domain api --address " + server.address() + kPatient;
  const Result allowed = weir(check + " key=a=b --hits 2");
  EXPECT_EQ(allowed.exit, 0);
  EXPECT_THAT(allowed.out, HasSubstr("allowed by rule-of-a=b\n"));
  EXPECT_THAT(allowed.out, testing::ContainsRegex("rule-of-a=b +allowed +5 +3 +1m30s +-\n"));
  const Result denied = weir(check + " key=k --hits 6");
  EXPECT_EQ(denied.exit, 1);
  EXPECT_THAT(denied.out, HasSubstr("denied by rule-of-k, retry after 1.5s\n"));
  const Result never = weir(check + " key=k --hits 7");
  EXPECT_EQ(never.exit, 1);
  EXPECT_THAT(never.out, HasSubstr("denied by rule-of-k: this cost can never pass\n"));
  const Result late = weir("check --domain leaky key=k --address " + server.address() + kPatient);
  EXPECT_EQ(late.exit, 0);
  EXPECT_THAT(late.out, HasSubstr("allowed by rule-of-k, forward after 250ms\n"));
  const Result none = weir("check --domain quiet key=k --address " + server.address() + kPatient);
  EXPECT_EQ(none.exit, 0);
  EXPECT_EQ(none.out, "allowed: no enforced rule matches\n");
}

TEST_F(Cli, CheckAsJson) {
  Server server;
  const std::string check = "check --json --domain api --address " + server.address() + kPatient;
  const Result denied = weir(check + " key=k --hits 6");
  EXPECT_EQ(denied.exit, 1);
  const auto json = nlohmann::json::parse(denied.out);
  EXPECT_EQ(json["allowed"], false);
  EXPECT_EQ(json["decided_by"], "rule-of-k");
  EXPECT_EQ(json["rules"][0]["limit"], 5);
  EXPECT_EQ(json["rules"][0]["reset_s"], 90.0);
  EXPECT_EQ(json["rules"][0]["retry_after_s"], 1.5);
  const Result never = weir(check + " key=k --hits 7");
  EXPECT_TRUE(nlohmann::json::parse(never.out)["rules"][0]["retry_after_s"].is_null());
}

TEST_F(Cli, CheckOfADeadNodeIsExitTwo) {
  const Result result =
      weir("check --domain api key=k --timeout 300ms --address " + dead_address());
  EXPECT_EQ(result.exit, 2);
  EXPECT_THAT(result.out, HasSubstr("weir: 127.0.0.1:"));
}

TEST_F(Cli, CheckWithAnIdIsToldTheSameAgain) {
  Server server;
  const std::string check = "check --domain api --id one key=k --address " + server.address();
  const Result first = weir(check + kPatient);
  EXPECT_THAT(first.out, HasSubstr("allowed by rule-of-k\n"));
  const Result again = weir(check + kPatient);
  EXPECT_EQ(again.exit, 0);
  EXPECT_THAT(again.out, HasSubstr("allowed before by rule-of-k\n"));
  EXPECT_EQ(nlohmann::json::parse(weir(check + " --json" + kPatient).out)["repeated"], true);
}

TEST_F(Cli, CheckGoesToAnotherNodeIfOneIsDown) {
  Server server;
  const std::string nodes = dead_address() + "," + dead_address() + "," + server.address();
  for (int k = 0; k < 4; ++k) {
    const Result result =
        weir(fmt::format("check --domain api --nodes {} key={}{}", nodes, k, kPatient));
    EXPECT_EQ(result.exit, 0) << result.out;
    EXPECT_THAT(result.out, HasSubstr(fmt::format("allowed by rule-of-{}\n", k)));
  }
}

TEST_F(Cli, CheckManyTimesWithLeases) {
  Server server;
  const std::string check =
      "check --domain api key=k --count 500 --json --address " + server.address() + kPatient;
  const auto plain = nlohmann::json::parse(weir(check).out);
  EXPECT_EQ(plain["allowed"], 500);
  EXPECT_EQ(plain["calls"], 500);
  const Result leased = weir(check + " --lease");
  EXPECT_EQ(leased.exit, 0);
  const auto json = nlohmann::json::parse(leased.out);
  EXPECT_EQ(json["allowed"], 500);
  EXPECT_LT(json["calls"].get<int>(), 50);
  EXPECT_GT(json["by_lease"].get<int>(), 450);
  const Result denied =
      weir("check --domain api key=k --hits 6 --count 3 --address " + server.address() + kPatient);
  EXPECT_EQ(denied.exit, 1);
  EXPECT_THAT(denied.out, HasSubstr("0 of 3 allowed, with 3 calls to nodes\n"));
}

TEST_F(Cli, RulesDecideWhenNoNodeAnswers) {
  const std::string check = "check --domain site ip=1 --timeout 2s --rules " + good_rules() +
                            " --nodes " + dead_address();
  const Result open = weir(check);
  EXPECT_EQ(open.exit, 0);
  EXPECT_THAT(open.out, AllOf(HasSubstr("allowed by per-ip\n"), HasSubstr("\ndegraded: ")));
  const auto json = nlohmann::json::parse(weir(check + " --json").out);
  EXPECT_EQ(json["degraded"], true);
  EXPECT_EQ(json["source"], "fallback");
  const std::string closed = file("closed.yaml",
                                  "domain: site\nrules:\n  - { name: per-ip, key: ip, limit: 1, "
                                  "window: 1m, on_failure: closed }\n");
  const Result denied = weir("check --domain site ip=1 --timeout 2s --rules " + closed +
                             " --nodes " + dead_address());
  EXPECT_EQ(denied.exit, 1);
  EXPECT_THAT(denied.out, HasSubstr("denied: limiter_unavailable\ndegraded: unavailable: "));
}

TEST_F(Cli, ReserveAndSettle) {
  Server server;
  const std::string at = " --address " + server.address() + kPatient;
  const Result held = weir("reserve --domain api key=k --hits 5" + at);
  EXPECT_EQ(held.exit, 0);
  const std::string ticket = "t60000000000@" + server.address();
  EXPECT_THAT(held.out, AllOf(HasSubstr("allowed by rule-of-k\n"),
                              testing::EndsWith("ticket " + ticket + "\n")));
  const Result json = weir("reserve --json --for 10s --domain api key=k --hits 5" + at);
  EXPECT_EQ(nlohmann::json::parse(json.out)["ticket"], "t10000000000@" + server.address());
  const Result denied = weir("reserve --domain api key=k --hits 6" + at);
  EXPECT_EQ(denied.exit, 1);
  EXPECT_THAT(denied.out, HasSubstr("denied by rule-of-k, retry after 1.5s\n"));
  EXPECT_THAT(weir("reserve --domain api key=k --hits 0" + at).out, HasSubstr("nothing is held\n"));

  const Result settled = weir("settle " + ticket + " --hits 3" + kPatient);
  EXPECT_EQ(settled.exit, 0);
  EXPECT_EQ(settled.out, "settled: 3 of 5 held\n");
  // A ticket as HTTP gives it does not name its node.
  EXPECT_EQ(weir("settle t60000000000 --hits 3" + at).out, settled.out);
  EXPECT_THAT(weir("settle " + ticket + " --hits 0" + kPatient).out,
              HasSubstr("some window was over"));
  const Result unknown = weir("settle other --json --hits 3" + at);
  EXPECT_EQ(unknown.exit, 1);
  EXPECT_EQ(nlohmann::json::parse(unknown.out)["settled"], false);
  EXPECT_EQ(weir("settle other --hits 3" + at).exit, 1);
  const Result dead = weir("settle t1@" + dead_address() + " --hits 3 --timeout 1s");
  EXPECT_EQ(dead.exit, 2);
  EXPECT_EQ(weir("settle other --hits 3 --nodes 127.0.0.1:1,127.0.0.1:2").exit, 2);
}

TEST_F(Cli, StatusOfOneAndOfSeveralNodes) {
  Server server;
  const Result one = weir("status --address " + server.address() + kPatient);
  EXPECT_EQ(one.exit, 0);
  EXPECT_THAT(one.out, AllOf(HasSubstr("eu/eu-1"), HasSubstr("per-key")));
  const Result json = weir("status --json --address " + server.address() + kPatient);
  EXPECT_EQ(nlohmann::json::parse(json.out)["rules"][0]["allowed"], 7);
  const std::string dead = dead_address();
  const Result two =
      weir("status --timeout 3s --address " + server.address() + " --address " + dead);
  EXPECT_EQ(two.exit, 2);
  EXPECT_THAT(two.out, AllOf(HasSubstr("eu/eu-1"), HasSubstr(dead + ": ")));
}

TEST_F(Cli, WatchGoesOnUntilInterrupted) {
  Server server;
  const std::string out = file("out", "");  // there before anybody counts its lines
  const std::string command = fmt::format(
      "'{}' status --watch --json --interval 10ms --address {}{} > {} & pid=$!; "
      "tries=0; while [ $(wc -l < {}) -lt 3 ] && [ $tries -lt 600 ]; do sleep 0.05; "
      "tries=$((tries+1)); done; kill -TERM $pid; wait $pid",
      WEIR_PROGRAM, server.address(), kPatient, out, out);
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  std::ifstream lines(out);
  int count = 0;
  for (std::string text; std::getline(lines, text); ++count) {
    EXPECT_EQ(nlohmann::json::parse(text)["node"], "eu-1");
  }
  EXPECT_GE(count, 3);
}

}  // namespace
}  // namespace weir::node
