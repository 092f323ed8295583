#include <weir/node/fronts/http/forward_auth.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include <weir/rpc/check.h>

namespace weir::node {
namespace {

using testing::HasSubstr;

constexpr std::string_view kProxy = "127.0.0.1";

/// What a head with these fields asks: "api method=GET path=/ …", or why it asks nothing.
std::string asked(std::string_view fields, std::string_view path = "/v1/auth/api",
                  std::string_view from = kProxy, ForwardAuthOptions options = {}) {
  const std::string head =
      "GET " + std::string(path) + " HTTP/1.1\r\n" + std::string(fields) + "\r\n";
  ForwardAuthReader reader(std::move(options));
  const auto request = reader.read(head, "GET", path, from);
  if (!request) return reader.error();
  EXPECT_EQ(request->hits, 1u);
  std::string out(request->domain);
  for (const Entry& entry : request->descriptor) {
    out.append(" ").append(entry.key).append("=").append(entry.value);
  }
  return out;
}

TEST(ForwardAuthTest, AsEachGatewaySendsIt) {
  // nginx
  EXPECT_EQ(asked("X-Original-URI: /a/b?c=d\r\nX-Original-Method: POST\r\nX-Real-IP: 192.0.2.7\r\n"
                  "X-Forwarded-Host: shop.example\r\nHost: weir\r\n"),
            "api method=POST path=/a/b host=shop.example ip=192.0.2.7");
  // Caddy, Traefik, APISIX
  EXPECT_EQ(asked("x-forwarded-for: 192.0.2.7\r\nX-Forwarded-Method: PUT\r\n"
                  "X-Forwarded-Uri: /a?b\r\nX-Forwarded-Host: shop.example\r\n"),
            "api method=PUT path=/a host=shop.example ip=192.0.2.7");
  // Envoy: the path goes behind the prefix
  EXPECT_EQ(asked("Host: shop.example\r\nX-Forwarded-For: 192.0.2.7\r\n", "/v1/auth/api/a/b"),
            "api method=GET path=/a/b host=shop.example ip=192.0.2.7");
  EXPECT_EQ(asked(""), "api method=GET path=/ ip=127.0.0.1");
}

TEST(ForwardAuthTest, AStrangerAsksForItself) {
  EXPECT_EQ(asked("X-Original-URI: /a\r\nX-Original-Method: POST\r\nX-Real-IP: 192.0.2.7\r\n"
                  "X-Forwarded-For: 192.0.2.8\r\nX-Forwarded-Host: b.example\r\nHost: weir\r\n",
                  "/v1/auth/api/own", "192.0.2.1"),
            "api method=GET path=/own host=weir ip=192.0.2.1");
  ForwardAuthOptions none;
  none.trusted_proxies.clear();
  EXPECT_EQ(asked("X-Real-IP: 192.0.2.7\r\n", "/v1/auth/api", kProxy, none),
            "api method=GET path=/ ip=127.0.0.1");
}

TEST(ForwardAuthTest, TheClientIsTheLastHopThatIsNotTrusted) {
  ForwardAuthOptions options;
  options.trusted_proxies = {*parse_cidr("127.0.0.0/8"), *parse_cidr("10.0.0.0/8"),
                             *parse_cidr("2001:db8::/32")};
  const auto ip = [&](std::string_view fields) {
    const std::string out = asked(fields, "/v1/auth/api", kProxy, options);
    return out.substr(out.find("ip="));
  };
  // What a client makes up stands before what the first proxy adds.
  EXPECT_EQ(ip("X-Forwarded-For: 1.1.1.1, 192.0.2.7, 10.1.1.1\r\n"), "ip=192.0.2.7");
  EXPECT_EQ(ip("X-Forwarded-For: 1.1.1.1\r\nX-Forwarded-For: 192.0.2.7 ,10.1.1.1\r\n"),
            "ip=192.0.2.7");
  std::string long_list = "X-Forwarded-For: 1.1.1.1";
  for (int i = 0; i < 500; ++i) long_list += ", 10.0.0.1";
  EXPECT_EQ(ip(long_list + "\r\n"), "ip=1.1.1.1");
  EXPECT_EQ(ip("X-Forwarded-For: 9.9.9.9, " + long_list.substr(17) + ", 192.0.2.9\r\n"),
            "ip=192.0.2.9");
  EXPECT_EQ(ip("X-Forwarded-For: 10.0.0.1, 10.0.0.2\r\n"), "ip=10.0.0.1");
  EXPECT_EQ(ip("X-Forwarded-For: [2001:db9::1]:4711\r\n"), "ip=2001:db9::1");
  EXPECT_EQ(ip("X-Forwarded-For: 192.0.2.7:4711\r\n"), "ip=192.0.2.7");
  // A hop that is no address tells nothing, and nothing stands behind it.
  EXPECT_EQ(ip("X-Forwarded-For: 192.0.2.7, unknown, 10.0.0.2\r\n"), "ip=10.0.0.2");
  EXPECT_EQ(ip("X-Forwarded-For: ,\r\nX-Real-IP: 192.0.2.7\r\n"), "ip=127.0.0.1");
  EXPECT_EQ(ip("X-Real-IP: not an address\r\n"), "ip=127.0.0.1");
  EXPECT_EQ(ip("X-Real-IP: 192.0.2.7/8\r\n"), "ip=127.0.0.1");
}

TEST(ForwardAuthTest, HeadersBecomeEntries) {
  ForwardAuthOptions options;
  options.headers = {{"x-api-key", "api_key"}, {"x-plan", "plan"}};
  EXPECT_EQ(asked("X-API-Key: k1\r\nX-Plan:  gold \r\nX-Api-Key: k2\r\n", "/v1/auth/api",
                  "192.0.2.1", options),
            "api api_key=k1 plan=gold method=GET path=/ ip=192.0.2.1");
  EXPECT_EQ(asked("X-Plan:\r\n", "/v1/auth/api", "192.0.2.1", options),
            "api method=GET path=/ ip=192.0.2.1");
}

TEST(ForwardAuthTest, TellsWhatIsNotFit) {
  EXPECT_THAT(asked("", "/v1/auth/"), HasSubstr("and a domain"));
  EXPECT_THAT(asked("", "/v1/auth//a"), HasSubstr("and a domain"));
  EXPECT_THAT(asked("", "/v1/auth/a%2Fb"), HasSubstr("without escapes"));
  EXPECT_THAT(asked("X-Forwarded-Uri: /" + std::string(rpc::kMaxText, 'a') + "\r\n"),
              HasSubstr("path: expected at most"));
  EXPECT_THAT(asked("X-Forwarded-Host: a\xff\r\n"), HasSubstr("host: expected"));
  EXPECT_EQ(asked("X-Forwarded-Uri: https://shop.example/a/b?c\r\n"),
            "api method=GET path=/a/b ip=127.0.0.1");
  EXPECT_EQ(asked("X-Forwarded-Uri: https://shop.example\r\n"),
            "api method=GET path=/ ip=127.0.0.1");
}

TEST(ForwardAuthTest, AQueryMayNameTheStatusOfADenial) {
  EXPECT_EQ(denial_status_of(""), 0u);
  EXPECT_EQ(denial_status_of("deny=403"), 403u);
  EXPECT_EQ(denial_status_of("a=b&deny=503"), 503u);
  EXPECT_EQ(denial_status_of("deny=200"), 0u);
  EXPECT_EQ(denial_status_of("xdeny=403&deny=4030"), 0u);
}

}  // namespace
}  // namespace weir::node
