#include <weir/node/access/access.h>

#include <gtest/gtest.h>
#include <sodium.h>
#include <unistd.h>

#include <string>

#include <fmt/format.h>

#include <weir/node/access/access_file.h>
#include <weir/node/access/session.h>
#include <weir/node/access/token.h>

namespace weir::node {
namespace {

rpc::Address at(const std::string& host) {
  std::string error;
  const auto address =
      rpc::parse_address(host.find(':') == host.npos ? host + ":1" : "[" + host + "]:1", error);
  EXPECT_TRUE(address) << error;
  return *address;
}

std::string with_hash(const std::string& token) {
  return to_string(hash_token(token));
}

std::shared_ptr<const AccessTable> table(const std::string& text) {
  LoadedAccess loaded = parse_access(text, "access.yaml");
  for (const ConfigError& error : loaded.errors) ADD_FAILURE() << error.to_string();
  return loaded.table;
}

std::string mistakes(const std::string& text) {
  std::string out;
  for (const ConfigError& error : parse_access(text, "a").errors) out += error.to_string() + "\n";
  return out;
}

TEST(Token, IsNewEachTimeAndItsHashIsWhatAFileHolds) {
  const std::string one = make_token();
  EXPECT_NE(one, make_token());
  EXPECT_EQ(one.size(), 5u + 64u);
  EXPECT_TRUE(one.starts_with("weir_"));
  const TokenHash hash = hash_token(one);
  EXPECT_EQ(parse_token_hash(to_string(hash)), hash);
  EXPECT_FALSE(parse_token_hash(one));
  EXPECT_FALSE(parse_token_hash(to_string(hash) + "0"));
  EXPECT_FALSE(parse_token_hash(to_string(hash).substr(8)));
}

TEST(Access, WithoutAFileLoopbackMayDoEverythingAndOthersNothing) {
  Access access;
  for (const char* host : {"127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"}) {
    Session session(&access, "http", at(host));
    const Caller& caller = session.caller();
    EXPECT_TRUE(caller.may_check("any") && caller.may_read() && caller.may_administer()) << host;
    EXPECT_EQ(caller.owner(), host);
  }
  for (const char* host : {"10.0.0.1", "192.0.2.1", "2001:db8::1", "::ffff:10.0.0.1"}) {
    Session session(&access, "http", at(host));
    const Caller& caller = session.caller();
    EXPECT_FALSE(caller.may_check("any") || caller.may_check() || caller.may_read() ||
                 caller.may_administer())
        << host;
  }
  Session nobody(nullptr, "http", at("127.0.0.1"));
  EXPECT_FALSE(nobody.caller().may_check("any"));
  EXPECT_EQ(nobody.caller().address, "127.0.0.1");
}

TEST(Access, AnonymousCallersHaveWhatTheFirstNetworkThatHoldsThemGives) {
  Access access;
  access.replace(table(R"(
anonymous:
  - from: [10.1.0.0/16]
  - from: [10.0.0.0/8, 2001:db8::/32]
    check: [web, api]
  - from: [127.0.0.0/8]
    read: true
)"));
  const auto may = [&](const char* host, const char* domain) {
    Session session(&access, "http", at(host));
    return session.caller().may_check(domain);
  };
  EXPECT_TRUE(may("10.2.0.1", "api"));
  EXPECT_TRUE(may("10.2.0.1", "web"));
  EXPECT_FALSE(may("10.2.0.1", "other"));
  EXPECT_FALSE(may("10.1.0.1", "api"));
  EXPECT_TRUE(may("2001:db8::7", "api"));
  EXPECT_FALSE(may("11.0.0.1", "api"));
  EXPECT_FALSE(may("127.0.0.1", "api"));  // said otherwise
  EXPECT_TRUE(may("::1", "api"));         // not said
  EXPECT_TRUE(access.table()->open_to_anonymous());
  EXPECT_FALSE(table("anonymous: [{from: [127.0.0.0/8], check: all}]")->open_to_anonymous());
  EXPECT_FALSE(table("anonymous: [{from: [0.0.0.0/0]}]")->open_to_anonymous());
  EXPECT_TRUE(table("anonymous: [{from: ['::/0'], read: true}]")->open_to_anonymous());
}

TEST(Access, ATokenSaysWhoSomebodyIs) {
  const std::string token = make_token();
  Access access;
  access.replace(table("tokens: [{name: gate, hash: '" + with_hash(token) + "', check: [api]}]"));
  Session session(&access, "http", at("192.0.2.1"));
  EXPECT_FALSE(session.caller().may_check("api"));
  EXPECT_TRUE(session.shows_token(token));
  EXPECT_TRUE(session.caller().may_check("api"));
  EXPECT_FALSE(session.caller().may_read());
  EXPECT_EQ(session.caller().grant->proof, Proof::token);
  EXPECT_EQ(session.caller().owner(), "=gate");
  EXPECT_FALSE(session.shows_token(token + "x"));
  EXPECT_FALSE(session.caller().may_check("api"));
  EXPECT_FALSE(session.shows_token(std::string(100'000, 'x')));
  EXPECT_FALSE(session.shows_token(""));
  // What is shown must be good, wherever it comes from.
  Session local(&access, "http", at("127.0.0.1"));
  EXPECT_FALSE(local.shows_token("weir_"));
  EXPECT_FALSE(local.caller().may_check("api"));
}

TEST(Access, AnHttpRequestIsAsGoodAsItsOwnField) {
  const std::string token = make_token();
  Access access;
  access.replace(table("tokens: [{name: gate, hash: '" + with_hash(token) + "', check: all}]"));
  Session session(&access, "http", at("192.0.2.1"));
  const auto may = [&](std::string_view field) {
    return session.with_authorization(field).may_check("api");
  };
  EXPECT_TRUE(may("Bearer " + token));
  EXPECT_TRUE(may("bearer   " + token));
  EXPECT_FALSE(may({}));
  EXPECT_TRUE(may("BEARER " + token));
  EXPECT_FALSE(may("Bearer " + token + " "));
  EXPECT_FALSE(may("Bearer"));
  EXPECT_FALSE(may("Basic eDp5"));
  EXPECT_TRUE(session.caller().flaw.empty());
  EXPECT_FALSE(may("Bearer "));
  EXPECT_FALSE(session.caller().flaw.empty());
  Session local(&access, "http", at("127.0.0.1"));
  EXPECT_TRUE(local.with_authorization("Basic eDp5").may_check("api"));
}

TEST(Access, ACertificateSaysWhoSomebodyIs) {
  Access access;
  access.replace(table(R"(
certificates:
  - name: spiffe://example/gate
    check: all
    read: true
)"));
  Session known(&access, "clients", at("192.0.2.1"));
  known.shows_certificate({"gate.example", "spiffe://example/gate"});
  EXPECT_TRUE(known.caller().may_check("api"));
  EXPECT_TRUE(known.caller().may_read());
  EXPECT_EQ(known.caller().owner(), "=spiffe://example/gate");
  Session unknown(&access, "clients", at("192.0.2.1"));
  unknown.shows_certificate({"other.example"});
  EXPECT_FALSE(unknown.caller().may_check("api"));
  EXPECT_EQ(unknown.caller().owner(), "192.0.2.1");
}

TEST(Access, WhatIsTakenAwayIsTakenFromConnectionsThatAreThere) {
  const std::string token = make_token();
  const std::string text = "tokens: [{name: gate, hash: '" + with_hash(token) + "', check: ";
  Access access;
  access.replace(table(text + "all}]"));
  Session session(&access, "http", at("192.0.2.1"));
  ASSERT_TRUE(session.shows_token(token));
  access.replace(table(text + "[web]}]"));
  EXPECT_FALSE(session.caller().may_check("api"));
  EXPECT_TRUE(session.caller().may_check("web"));
  access.replace(table("tokens: []"));
  EXPECT_FALSE(session.caller().may_check("web"));
  EXPECT_FALSE(session.caller().flaw.empty());
}

TEST(Access, DenialsSayWhyAreCountedAndAreLoggedAtABoundedRate) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  LogOptions options;
  options.fd = pipe[1];
  Log log(options);
  Access access(&log);
  const std::string token = make_token();
  access.replace(table("tokens: [{name: gate, hash: '" + with_hash(token) + "'}]"));
  Session session(&access, "http", at("192.0.2.1"));
  EXPECT_EQ(deny(session.caller(), "check").to_string(),
            "unauthenticated: who shows neither a token nor a certificate may not check");
  session.shows_token("x");
  EXPECT_EQ(deny(session.caller(), "check").to_string(), "unauthenticated: the token is not known");
  session.shows_token(token);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(deny(session.caller(), "check").to_string(), "forbidden: gate may not check");
  }
  EXPECT_EQ(access.denials(2, DenialReason::anonymous), 1u);
  EXPECT_EQ(access.denials(2, DenialReason::unknown), 1u);
  EXPECT_EQ(access.denials(2, DenialReason::forbidden), 100u);
  EXPECT_EQ(access.denials(1, DenialReason::forbidden), 0u);
  ::close(pipe[1]);
  std::string lines;
  char buffer[8192];
  for (ssize_t got; (got = ::read(pipe[0], buffer, sizeof buffer)) > 0;) {
    lines.append(buffer, static_cast<std::size_t>(got));
  }
  ::close(pipe[0]);
  EXPECT_NE(lines.find(R"("event":"access_denied","front":"http","reason":"anonymous")"),
            lines.npos)
      << lines;
  const auto count = std::count(lines.begin(), lines.end(), '\n');
  EXPECT_GE(count, 10);
  EXPECT_LE(count, 20);
  EXPECT_EQ(lines.find(token), lines.npos);
}

TEST(AccessFile, SaysWhatIsWrongAndWhere) {
  EXPECT_EQ(mistakes("tokens: [{name: a}]"), "a:1:10: tokens[0].hash: required field is missing\n");
  const std::string token = make_token();
  const std::string bad = mistakes("tokens: [{name: a, hash: " + token + "}]");
  EXPECT_EQ(bad,
            "a:1:26: tokens[0].hash: expected blake2b: and 64 hexadecimal digits, as weir token "
            "prints them\n");
  const std::string hash = with_hash(token);
  EXPECT_EQ(mistakes(fmt::format("tokens:\n- {{name: a, hash: '{0}'}}\n- {{name: b, hash: '{0}'}}",
                                 hash)),
            "a:3:3: tokens[1]: repeated hash; expected it once\n");
  EXPECT_EQ(mistakes("certificates:\n- name: a\n- name: a"),
            "a:3:3: certificates[1]: repeated name; expected it once\n");
  EXPECT_NE(mistakes("anonymous: [{from: [10.0.0.1/8]}]").find("expected a network"),
            std::string::npos);
  EXPECT_NE(mistakes("anonymous: [{check: all}]").find("anonymous[0].from"), std::string::npos);
  EXPECT_NE(mistakes("anonymous: [{from: [10.0.0.0/8], check: api}]")
                .find("expected all, or a list of domains, got 'api'"),
            std::string::npos);
  EXPECT_NE(mistakes("roles: []").find("unknown field"), std::string::npos);
  EXPECT_NE(mistakes("").find("expected a mapping"), std::string::npos);
}

}  // namespace
}  // namespace weir::node

int main(int argc, char** argv) {
  if (sodium_init() < 0) return 1;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
