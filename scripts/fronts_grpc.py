"""What grpc-python makes of a node: scripts/fronts runs it with an interpreter that has grpcio.

usage: fronts_grpc.py STUBS ADDRESS [watch]
Prints an object, case to true or what failed. With `watch` the node's health, a number a line.
"""
import json
import sys

sys.path.insert(0, sys.argv[1])
import grpc  # noqa: E402
from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2  # noqa: E402
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc  # noqa: E402
from google.protobuf import duration_pb2  # noqa: E402


def by_path(path):
    """A generated module whose package has the name of one that is installed (grpc, weir.internal)."""
    import importlib.util
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), f"{sys.argv[1]}/{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


health_pb2 = by_path("grpc/health/v1/health_pb2")
reflection_pb2 = by_path("grpc/reflection/v1/reflection_pb2")
weir_pb2 = by_path("weir/v1/weir_pb2")
channel = grpc.insecure_channel(sys.argv[2])


def unary(path, answer):
    return channel.unary_unary(path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer.FromString)


def weir(method):
    return unary(f"/weir.v1.Weir/{method}", getattr(weir_pb2, f"{'Check' if method == 'Check' else method}Response"))


def watch():
    call = channel.unary_stream("/grpc.health.v1.Health/Watch", request_serializer=lambda m: m.SerializeToString(),
                                response_deserializer=health_pb2.HealthCheckResponse.FromString)
    for answer in call(health_pb2.HealthCheckRequest()):
        print(answer.status, flush=True)


def request(user, domain="api", hits=None):
    descriptor = weir_pb2.Descriptor(entries=[weir_pb2.Entry(key="user", value=user)])
    if hits is not None:
        descriptor.hits = hits
    return weir_pb2.CheckRequest(domain=domain, descriptors=[descriptor])


def limit(user, domain="api"):
    entry = ratelimit_pb2.RateLimitDescriptor.Entry(key=b"user", value=user.encode())
    return rls_pb2.RateLimitRequest(domain=domain, descriptors=[ratelimit_pb2.RateLimitDescriptor(entries=[entry])])


def code_of(call):
    try:
        call()
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


def expect(one, other):
    if one != other:
        raise AssertionError(f"{one!r} is not {other!r}")


def rate_limit():
    stub = rls_pb2_grpc.RateLimitServiceStub(channel)
    codes = [stub.ShouldRateLimit(limit("a"), timeout=5).overall_code for _ in range(6)]
    expect(codes, [1] * 5 + [2])


def check():
    answers = [weir("Check")(request("b"), timeout=5) for _ in range(6)]
    expect([answer.allowed for answer in answers], [True] * 5 + [False])
    status = answers[5].statuses[answers[5].deciding]
    expect((status.rule, status.remaining, 0 < status.retry_after.seconds <= 12), ("per-user", 0, True))
    expect(weir("Check")(request("b", hits=0), timeout=5).statuses[0].remaining, 0)


def batch():
    many = weir_pb2.CheckBatchRequest(requests=[request("c"), request("c", domain=""), request("d")])
    answers = weir("CheckBatch")(many, timeout=5).responses
    expect([answer.allowed for answer in answers], [True, False, True])
    expect(answers[1].error.kind, weir_pb2.INVALID)


def reserve():
    held = weir("Reserve")(weir_pb2.ReserveRequest(request=request("e", hits=4)), timeout=5)
    expect((held.decision.allowed, bool(held.ticket)), (True, True))
    settled = weir("Settle")(weir_pb2.SettleRequest(ticket=held.ticket, hits=1), timeout=5)
    expect(settled.reserved, 4)
    expect(weir("Check")(request("e", hits=0), timeout=5).statuses[0].remaining, 4)
    again = weir_pb2.SettleRequest(ticket=held.ticket, hits=1)
    expect(code_of(lambda: weir("Settle")(again, timeout=5)), grpc.StatusCode.NOT_FOUND)


def lease():
    load = weir_pb2.Descriptor(entries=[weir_pb2.Entry(key="load", value="l")])
    asked = weir_pb2.LeaseRequest(request=weir_pb2.CheckRequest(domain="api", descriptors=[load]), most=100,
                                  term=duration_pb2.Duration(seconds=1))
    got = weir("Lease")(asked, timeout=5)
    expect((got.decision.allowed, got.hits, bool(got.ticket)), (True, 100, True))


def health():
    ask = unary("/grpc.health.v1.Health/Check", health_pb2.HealthCheckResponse)
    expect(ask(health_pb2.HealthCheckRequest(), timeout=5).status, 1)
    unknown = health_pb2.HealthCheckRequest(service="nothing")
    expect(code_of(lambda: ask(unknown, timeout=5)), grpc.StatusCode.NOT_FOUND)


def reflection():
    for version in ("v1", "v1alpha"):
        call = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                                     request_serializer=lambda m: m.SerializeToString(),
                                     response_deserializer=reflection_pb2.ServerReflectionResponse.FromString)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services=""),
                      reflection_pb2.ServerReflectionRequest(file_containing_symbol="weir.v1.Weir.Check")])
        answers = list(call(asked, timeout=5))
        expect("weir.v1.Weir" in [one.name for one in answers[0].list_services_response.service], True)
        expect(len(answers[1].file_descriptor_response.file_descriptor_proto), 2)


def refusals():
    big = request("x" * 100_000)
    expect(code_of(lambda: weir("Check")(big, timeout=5)), grpc.StatusCode.RESOURCE_EXHAUSTED)
    zipped = lambda: weir("Check")(request("x" * 2000), timeout=5, compression=grpc.Compression.Gzip)
    expect(code_of(zipped), grpc.StatusCode.UNIMPLEMENTED)
    expect(code_of(lambda: unary("/weir.v1.Weir/Nothing", weir_pb2.CheckResponse)(request("x"), timeout=5)),
           grpc.StatusCode.UNIMPLEMENTED)
    expect(code_of(lambda: weir("Check")(request("x", domain=""), timeout=5)), grpc.StatusCode.INVALID_ARGUMENT)


def many():
    ask = weir("Check")
    calls = [ask.future(request(f"many{i}"), timeout=20) for i in range(2000)]
    expect(all(call.result().allowed for call in calls), True)


def large():
    entries = [weir_pb2.Entry(key=f"k{i}", value="v" * 500) for i in range(60)]
    one = weir_pb2.CheckRequest(domain="api", descriptors=[weir_pb2.Descriptor(entries=entries)])
    ask = weir("Check")
    calls = [ask.future(one, timeout=20) for _ in range(100)]
    expect(all(call.result().allowed for call in calls), True)


CASES = {"RateLimitService": rate_limit, "Check": check, "CheckBatch": batch, "Reserve and Settle": reserve, "Lease": lease,
         "health": health, "reflection": reflection, "refusals": refusals, "2000 calls at once": many,
         "100 messages of 30 KiB at once": large}


def main():
    results = {}
    for name, case in CASES.items():
        try:
            case()
            results[name] = True
        except Exception as failure:  # whatever it is, the others go on
            results[name] = f"{type(failure).__name__}: {failure}"
    print(json.dumps(results))


watch() if sys.argv[3:] == ["watch"] else main()
