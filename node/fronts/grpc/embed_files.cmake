# Writes the bytes of FROM as C++ into TO: kGrpcFiles of grpc_reflection.cc.
file(READ ${FROM} bytes HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE ${TO} "#include <cstddef>
namespace weir::node {
extern const unsigned char kGrpcFiles[];
extern const std::size_t kGrpcFilesSize;
const unsigned char kGrpcFiles[] = {
${bytes}};
const std::size_t kGrpcFilesSize = sizeof kGrpcFiles;
}  // namespace weir::node
")
