#include <weir/node/fronts/redis/redis_commands.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weir/node/fronts/redis/resp_parser.h>
#include <weir/node/fronts/redis/resp_text.h>

namespace weir::node {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

using State = RespParser::State;

// --- The parser ---

/// The commands of `bytes`, each with its words in brackets, and the error that ends them.
std::string parsed(std::string_view bytes, std::size_t piece) {
  RespParser parser;
  std::string out;
  std::size_t begin = 0;
  for (std::size_t end = 0; end < bytes.size();) {
    end = std::min(end + piece, bytes.size());
    while (true) {
      const State state = parser.read(bytes.substr(begin, end - begin));
      if (state == State::more) break;
      if (state == State::bad) return out + "! " + std::string(parser.error());
      for (const std::string_view word : parser.arguments()) out += "[" + std::string(word) + "]";
      out += ";";
      begin += parser.size();
      parser.reset();
    }
  }
  return out + (begin == bytes.size() ? "" : "...");
}

/// The same however it is cut.
std::string parsed(std::string_view bytes) {
  const std::string whole = parsed(bytes, bytes.size());
  for (std::size_t piece = 1; piece < 9; ++piece) EXPECT_EQ(parsed(bytes, piece), whole) << piece;
  return whole;
}

TEST(RespParser, ReadsArraysAndLines) {
  EXPECT_EQ(parsed("*2\r\n$3\r\nGET\r\n$1\r\na\r\n"), "[GET][a];");
  EXPECT_EQ(parsed("*1\r\n$4\r\nPING\r\n*2\r\n$4\r\nECHO\r\n$4\r\na\r\nb\r\n"),
            "[PING];[ECHO][a\r\nb];");
  EXPECT_EQ(parsed("*2\r\n$3\r\nGET\r\n$0\r\n\r\n"), "[GET][];");
  EXPECT_EQ(parsed("PING\r\n  GET \t a \n\r\n*0\r\nINCR x\r\n"), "[PING];[GET][a];;;[INCR][x];");
  EXPECT_EQ(parsed("*2\r\n$3\r\nGET\r\n$1\r\n"), "...");
  EXPECT_EQ(parsed("PING"), "...");
}

TEST(RespParser, RefusesWhatIsNoCommand) {
  for (const char* bad :
       {"*-1\r\n", "*+1\r\n", "*01\r\n", "*1\n", "* 1\r\n", "*\r\n", "*1025\r\n",
        "*99999999999999999999\r\n", "*1\r\nGET\r\n", "*1\r\n$-1\r\n", "*1\r\n$65537\r\n",
        "*1\r\n$1\r\nab\r\n", "*1\r\n$1\r\na\nb", "GET \"a\"\r\n", "GET 'a'\r\n", "GET \1\r\n"}) {
    EXPECT_THAT(parsed(bad), StartsWith("! Protocol error: ")) << bad;
  }
  EXPECT_THAT(parsed(std::string(4096, 'x')), HasSubstr("longer than 4096"));
  EXPECT_THAT(parsed("*2\r\n$40000\r\n" + std::string(40000, 'x') + "\r\n$40000\r\n", 100),
              HasSubstr("longer than 65536"));
}

TEST(RespText, ErrorsAreOneLine) {
  rpc::Output out;
  append_resp_error(out, "ERR a\r\n+OK\r\n");
  EXPECT_EQ(out.view(), "-ERR a  +OK  \r\n");
  out.clear();
  append_resp_error(out, std::string(10000, 'x'));
  EXPECT_EQ(out.size(), 515u);
}

// --- Commands, and what they are told ---

Status status_of(std::uint64_t limit, std::uint64_t remaining, Nanos reset, Nanos retry = 0) {
  Status status;
  status.rule = "logins";
  status.limit = limit;
  status.remaining = remaining;
  status.reset = reset;
  status.retry_after = retry;
  status.allowed = retry == 0;
  status.window = kMinute;
  return status;
}

Reply reply_of(const Status& status) {
  Reply reply;
  reply.allowed = status.allowed;
  reply.deciding = 0;
  reply.statuses = {status};
  return reply;
}

class RedisCommandsTest : public testing::Test {
 protected:
  /// Runs one command; what it asks, as text.
  std::vector<std::string> run(std::vector<std::string_view> words) {
    batch_.clear();
    commands_.run(words, batch_);
    std::vector<std::string> out;
    for (const Request& request : batch_.finish()) {
      std::string text =
          std::string(request.domain) + " " + std::string(request.descriptor[0].key) + "=" +
          std::string(request.descriptor[0].value) + " *" + std::to_string(request.hits);
      if (request.kind == RequestKind::refund) text += " refund";
      if (request.limit.any()) {
        text += " " + std::to_string(request.limit.limit) + " in " +
                std::to_string(request.limit.window / kSecond) + " s, burst " +
                std::to_string(request.limit.burst);
      }
      out.push_back(text);
    }
    return out;
  }
  /// The answer of a command that asks nothing, or all the answers of a transaction.
  std::string answer(std::vector<std::string_view> words) {
    EXPECT_THAT(run(std::move(words)), IsEmpty());
    std::string out;
    for (const RedisCall& call : batch_.calls) {
      EXPECT_TRUE(call.done);
      out += call.text.view();
    }
    return out;
  }
  /// The answer of a command that asks, if that is the reply.
  std::string told(std::vector<std::string_view> words, const Reply& reply) {
    run(std::move(words));
    if (batch_.calls.size() != 1 || batch_.calls[0].done) return "asks nothing";
    rpc::Output out;
    const std::vector<Reply> replies(batch_.calls[0].requests, reply);
    append_answer(out, batch_.calls[0], replies);
    return std::string(out.view());
  }
  std::string told(std::vector<std::string_view> words, const Status& status) {
    return told(std::move(words), reply_of(status));
  }

  std::string shown_;
  RedisBatch batch_;
  RedisCommands commands_{"d", 7, [this](std::optional<std::string_view> token) {
                            shown_ = token ? std::string(*token) : "(none)";
                            return shown_ == "good";
                          }};
};

TEST_F(RedisCommandsTest, ThrottleAsks) {
  EXPECT_THAT(run({"CL.THROTTLE", "ann", "15", "30", "60"}),
              ElementsAre("d key=ann *1 30 in 60 s, burst 16"));
  EXPECT_THAT(run({"cl.throttle", "ann", "0", "1", "1", "0"}),
              ElementsAre("d key=ann *0 1 in 1 s, burst 1"));
  for (auto words : std::vector<std::vector<std::string_view>>{{"-1", "1", "1"},
                                                               {"1", "0", "1"},
                                                               {"1", "1", "0"},
                                                               {"1", "1", "9223372037"},
                                                               {"1", "1", "1", "-1"},
                                                               {"1.5", "1", "1"},
                                                               {"+1", "1", "1"},
                                                               {"01", "1", "1"},
                                                               {"9223372036854775807", "1", "1"}}) {
    words.insert(words.begin(), {"CL.THROTTLE", "ann"});
    EXPECT_THAT(answer(words), AllOf(StartsWith("-ERR "), HasSubstr("expected")));
  }
  EXPECT_THAT(answer({"CL.THROTTLE", "ann", "1", "1"}), HasSubstr("wrong number of arguments"));
}

// As redis-cell: of a millisecond or more the full seconds and one.
TEST_F(RedisCommandsTest, ThrottleTellsSecondsAsRedisCell) {
  EXPECT_EQ(redis_cell_seconds(0), 0u);
  EXPECT_EQ(redis_cell_seconds(kMillisecond - 1), 0u);
  EXPECT_EQ(redis_cell_seconds(kMillisecond), 1u);
  EXPECT_EQ(redis_cell_seconds(kSecond - 1), 1u);
  EXPECT_EQ(redis_cell_seconds(kSecond), 2u);
  EXPECT_EQ(redis_cell_seconds(2 * kSecond + 1), 3u);
  const std::vector<std::string_view> ask = {"CL.THROTTLE", "ann", "15", "30", "60"};
  EXPECT_EQ(told(ask, status_of(16, 15, 2 * kSecond)), "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:3\r\n");
  EXPECT_EQ(told(ask, status_of(16, 0, 31 * kSecond + 1, kSecond + kMillisecond)),
            "*5\r\n:1\r\n:16\r\n:0\r\n:2\r\n:32\r\n");
  EXPECT_EQ(told(ask, status_of(16, 16, 0, kNever)), "*5\r\n:1\r\n:16\r\n:16\r\n:-1\r\n:0\r\n");
}

TEST_F(RedisCommandsTest, CountsAreTold) {
  EXPECT_THAT(run({"INCR", "a"}), ElementsAre("d key=a *1"));
  EXPECT_THAT(run({"INCRBY", "a", "5"}), ElementsAre("d key=a *5"));
  EXPECT_THAT(run({"INCRBY", "a", "-5"}), ElementsAre("d key=a *5 refund"));
  EXPECT_THAT(run({"DECR", "a"}), ElementsAre("d key=a *1 refund"));
  EXPECT_EQ(told({"INCR", "a"}, status_of(10, 7, kMinute)), ":3\r\n");
  // Denied: what it would be, which is more than the limit.
  EXPECT_EQ(told({"INCR", "a"}, status_of(10, 0, kMinute, kSecond)), ":11\r\n");
  EXPECT_EQ(told({"INCRBY", "a", "5"}, status_of(10, 2, kMinute, kSecond)), ":13\r\n");
  EXPECT_EQ(told({"INCRBY", "a", "9223372036854775807"}, status_of(10, 2, kMinute, kNever)),
            ":9223372036854775807\r\n");
  EXPECT_EQ(told({"GET", "a"}, status_of(10, 7, kMinute)), "$1\r\n3\r\n");
  EXPECT_EQ(told({"GET", "a"}, status_of(10, 10, kMinute)), "$-1\r\n");
  EXPECT_EQ(told({"TTL", "a"}, status_of(10, 7, 1500 * kMillisecond)), ":2\r\n");
  EXPECT_EQ(told({"PTTL", "a"}, status_of(10, 7, 1500 * kMillisecond - 1)), ":1500\r\n");
  EXPECT_EQ(told({"TTL", "a"}, status_of(10, 10, kMinute)), ":-2\r\n");
  EXPECT_EQ(told({"EXISTS", "a", "b"}, status_of(10, 9, kMinute)), ":2\r\n");
  EXPECT_THAT(answer({"INCRBY", "a", "x"}), StartsWith("-ERR value is not an integer"));
  EXPECT_THAT(answer({"INCRBY", "a", "-9223372036854775808"}), StartsWith("-ERR value"));
}

TEST_F(RedisCommandsTest, ExpireAndSetNameTheRulesWindow) {
  EXPECT_EQ(told({"EXPIRE", "a", "60"}, status_of(10, 9, kMinute)), ":1\r\n");
  EXPECT_EQ(told({"EXPIRE", "a", "60", "NX"}, status_of(10, 9, kMinute)), ":0\r\n");
  EXPECT_EQ(told({"PEXPIRE", "a", "60000"}, status_of(10, 10, kMinute)), ":0\r\n");
  EXPECT_EQ(told({"EXPIRE", "a", "30"}, status_of(10, 9, kMinute)),
            "-ERR the window of rule 'logins' is 60000 ms: EXPIRE must name as much\r\n");
  EXPECT_THAT(answer({"EXPIRE", "a", "0"}), HasSubstr("DEL"));
  EXPECT_THAT(answer({"EXPIRE", "a", "1", "GT"}), HasSubstr("only NX and XX"));

  const std::vector<std::string_view> once = {"SET", "a", "x", "NX", "EX", "60"};
  EXPECT_THAT(run(once), ElementsAre("d key=a *1"));
  EXPECT_EQ(told(once, status_of(1, 0, kMinute)), "+OK\r\n");
  EXPECT_EQ(told(once, status_of(1, 0, kMinute, kSecond)), "$-1\r\n");
  EXPECT_THAT(told(once, status_of(5, 4, kMinute)), HasSubstr("needs a limit of 1"));
  const std::vector<std::string_view> begin = {"SET", "a", "0", "PX", "60000", "NX"};
  EXPECT_THAT(run(begin), ElementsAre("d key=a *0"));
  EXPECT_EQ(told(begin, status_of(5, 5, kMinute)), "+OK\r\n");
  EXPECT_EQ(told(begin, status_of(5, 4, kMinute)), "$-1\r\n");
  EXPECT_THAT(answer({"SET", "a", "1"}), HasSubstr("needs NX and EX or PX"));
  EXPECT_THAT(answer({"SET", "a", "1", "XX", "EX", "60"}), HasSubstr("is known"));
}

TEST_F(RedisCommandsTest, DelGivesBack) {
  EXPECT_THAT(run({"DEL", "a", "b"}), ElementsAre("d key=a *9223372036854775807 refund",
                                                  "d key=b *9223372036854775807 refund"));
  Reply reply = reply_of(status_of(10, 10, 0));
  EXPECT_EQ(told({"DEL", "a"}, reply), ":0\r\n");
  reply.given_back = 3;
  EXPECT_EQ(told({"DEL", "a", "b"}, reply), ":2\r\n");
}

TEST_F(RedisCommandsTest, FailuresAreErrors) {
  Reply reply;
  reply.fail(ErrorKind::unauthenticated, "nobody");
  EXPECT_EQ(told({"INCR", "a"}, reply), "-NOAUTH nobody\r\n");
  reply.fail(ErrorKind::forbidden, "ann may not");
  EXPECT_EQ(told({"INCR", "a"}, reply), "-NOPERM ann may not\r\n");
  reply.fail(ErrorKind::overloaded, "shed");
  EXPECT_EQ(told({"INCR", "a"}, reply), "-ERR overloaded: shed\r\n");
  Reply nobody;
  nobody.allowed = true;
  EXPECT_THAT(told({"INCR", "a"}, nobody), HasSubstr("no rule limits this key"));
  // In shadow only: it passes, and the figures are told.
  Reply shadow = reply_of(status_of(10, 0, kMinute, kSecond));
  shadow.allowed = true;
  shadow.deciding = -1;
  EXPECT_EQ(told({"CL.THROTTLE", "a", "9", "1", "1"}, shadow),
            "*5\r\n:0\r\n:10\r\n:0\r\n:-1\r\n:61\r\n");
}

TEST_F(RedisCommandsTest, OthersAreRefusedWithAHint) {
  EXPECT_THAT(answer({"LPUSH", "a", "b"}),
              AllOf(StartsWith("-ERR unknown command 'LPUSH'"), HasSubstr("CL.THROTTLE")));
  EXPECT_THAT(answer({"EVAL", "return 1", "0"}), HasSubstr("use CL.THROTTLE"));
  EXPECT_THAT(answer({"EVALSHA", "abc", "0"}), HasSubstr("use CL.THROTTLE"));
  EXPECT_THAT(answer({"SCRIPT", "LOAD", "return 1"}), HasSubstr("use CL.THROTTLE"));
  EXPECT_THAT(answer({"WATCH", "a"}), HasSubstr("does not watch"));
  EXPECT_THAT(answer({"INCR", std::string(5000, 'x')}), HasSubstr("at most 4096 bytes"));
}

TEST_F(RedisCommandsTest, ConnectionsBegin) {
  EXPECT_EQ(answer({"PING"}), "+PONG\r\n");
  EXPECT_EQ(answer({"PING", "x"}), "$1\r\nx\r\n");
  EXPECT_EQ(answer({"ECHO", "x"}), "$1\r\nx\r\n");
  EXPECT_EQ(answer({"SELECT", "0"}), "+OK\r\n");
  EXPECT_THAT(answer({"SELECT", "1"}), StartsWith("-ERR DB index"));
  EXPECT_EQ(answer({"CLIENT", "SETINFO", "lib-name", "x"}), "+OK\r\n");
  EXPECT_EQ(answer({"CLIENT", "GETNAME"}), "$-1\r\n");
  EXPECT_EQ(answer({"CLIENT", "ID"}), ":7\r\n");
  EXPECT_THAT(answer({"CLIENT", "MAINT_NOTIFICATIONS", "ON"}), StartsWith("-ERR unknown"));
  EXPECT_EQ(answer({"COMMAND"}), "*0\r\n");
  EXPECT_EQ(answer({"COMMAND", "DOCS"}), "*0\r\n");
  EXPECT_EQ(answer({"CONFIG", "GET", "save"}), "*2\r\n$4\r\nsave\r\n$0\r\n\r\n");
  EXPECT_THAT(answer({"INFO"}), HasSubstr("loading:0"));
  EXPECT_FALSE(commands_.ends());
  EXPECT_EQ(answer({"QUIT"}), "+OK\r\n");
  EXPECT_TRUE(commands_.ends());
}

TEST_F(RedisCommandsTest, HelloChoosesTheProtocol) {
  EXPECT_THAT(answer({"HELLO"}), StartsWith("*14\r\n$6\r\nserver\r\n$4\r\nweir\r\n"));
  EXPECT_THAT(answer({"HELLO", "3", "SETNAME", "me"}), StartsWith("%7\r\n"));
  EXPECT_EQ(answer({"CLIENT", "GETNAME"}), "$2\r\nme\r\n");
  EXPECT_EQ(answer({"CONFIG", "GET", "x"}), "%0\r\n");
  EXPECT_EQ(told({"GET", "a"}, status_of(10, 10, kMinute)), "_\r\n");
  EXPECT_THAT(answer({"HELLO", "4"}), StartsWith("-NOPROTO"));
  EXPECT_THAT(answer({"HELLO", "2", "AUTH", "u", "bad"}), StartsWith("-WRONGPASS"));
  EXPECT_EQ(told({"GET", "a"}, status_of(10, 10, kMinute)), "_\r\n");  // as before
  EXPECT_THAT(answer({"HELLO", "2", "AUTH", "u", "good"}), StartsWith("*14\r\n"));
  EXPECT_THAT(answer({"HELLO", "2", "AUTH", "u"}), StartsWith("-ERR syntax"));
  EXPECT_EQ(answer({"AUTH", "good"}), "+OK\r\n");
  EXPECT_EQ(answer({"AUTH", "user", "good"}), "+OK\r\n");
  EXPECT_THAT(answer({"AUTH", ""}), StartsWith("-WRONGPASS"));
  EXPECT_EQ(answer({"HELLO", "3"}).substr(0, 2), "%7");
  EXPECT_EQ(answer({"RESET"}), "+RESET\r\n");
  EXPECT_EQ(shown_, "(none)");
  EXPECT_EQ(answer({"COMMAND", "DOCS"}), "*0\r\n");  // RESP2 again
}

TEST_F(RedisCommandsTest, TransactionsRunInOrder) {
  EXPECT_EQ(answer({"MULTI"}), "+OK\r\n");
  EXPECT_EQ(answer({"INCR", "a"}), "+QUEUED\r\n");
  EXPECT_EQ(answer({"PING"}), "+QUEUED\r\n");
  EXPECT_EQ(answer({"EXPIRE", "a", "60"}), "+QUEUED\r\n");
  EXPECT_THAT(run({"EXEC"}), ElementsAre("d key=a *1", "d key=a *0"));
  ASSERT_EQ(batch_.calls.size(), 4u);
  EXPECT_EQ(batch_.calls[0].text.view(), "*3\r\n");
  EXPECT_EQ(batch_.calls[2].text.view(), "+PONG\r\n");
  EXPECT_THAT(answer({"EXEC"}), StartsWith("-ERR EXEC without MULTI"));

  answer({"MULTI"});
  EXPECT_THAT(answer({"MULTI"}), HasSubstr("nested"));
  EXPECT_EQ(answer({"DISCARD"}), "+OK\r\n");
  EXPECT_EQ(answer({"PING"}), "+PONG\r\n");

  for (const std::vector<std::string_view>& bad : std::vector<std::vector<std::string_view>>{
           {"LPUSH", "a", "b"}, {"INCR"}, {"AUTH", "good"}, {"WATCH", "a"}}) {
    answer({"MULTI"});
    EXPECT_THAT(answer(bad), StartsWith("-ERR "));
    EXPECT_EQ(answer({"PING"}), "+QUEUED\r\n");
    EXPECT_THAT(answer({"EXEC"}), StartsWith("-EXECABORT"));
    EXPECT_EQ(answer({"PING"}), "+PONG\r\n");
  }
}

TEST_F(RedisCommandsTest, TransactionsAreBounded) {
  answer({"MULTI"});
  for (std::size_t i = 0; i < kMaxRedisQueued; ++i) EXPECT_EQ(answer({"PING"}), "+QUEUED\r\n");
  EXPECT_THAT(answer({"PING"}), StartsWith("-ERR a transaction has at most"));
  EXPECT_THAT(answer({"EXEC"}), StartsWith("-EXECABORT"));
  answer({"MULTI"});
  const std::string large(60'000, 'x');
  EXPECT_EQ(answer({"ECHO", large}), "+QUEUED\r\n");
  EXPECT_THAT(answer({"ECHO", large}), StartsWith("-ERR a transaction has at most"));
}

TEST_F(RedisCommandsTest, HttpIsNotSpokenHere) {
  EXPECT_THAT(answer({"POST", "/", "HTTP/1.1"}), HasSubstr("not HTTP"));
  EXPECT_TRUE(commands_.ends());
}

}  // namespace
}  // namespace weir::node
