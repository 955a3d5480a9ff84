// Embeds texts over the Open Inference Protocol and prints their similarity to the first one.
//
//   embed [--address HOST:PORT] [--model NAME] [--ca FILE] [--cert FILE --cert-key FILE] [--key-file FILE] TEXT...
//
// A key comes from PENSTOCK_API_KEY or a file, never from an argument, because other users of the machine can read arguments.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "open_inference.grpc.pb.h"

namespace {

constexpr auto kDeadline = std::chrono::seconds(30);

struct Options {
  std::map<std::string, std::string> named = {
      {"address", "localhost:50051"}, {"model", "minilm"}, {"ca", ""}, {"cert", ""}, {"cert-key", ""}, {"key-file", ""}};
  std::vector<std::string> texts;
};

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      options.texts.push_back(word);
      continue;
    }
    const auto found = options.named.find(word.substr(2));
    if (found == options.named.end() || i + 1 == argc) throw std::runtime_error("what is " + word + "?");
    found->second = argv[++i];
  }
  if (options.texts.empty()) options.texts = {"How do plants eat?", "Photosynthesis turns light into sugar.", "A red car."};
  return options;
}

std::string Read(const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string Key(const std::string& path) {
  const char* given = std::getenv("PENSTOCK_API_KEY");
  std::string key = path.empty() ? (given == nullptr ? "" : given) : Read(path);
  while (!key.empty() && std::isspace(static_cast<unsigned char>(key.back()))) key.pop_back();
  return key;
}

// Uses TLS if an authority is given; a client certificate identifies the caller.
std::shared_ptr<grpc::ChannelCredentials> Credentials(const Options& options) {
  const auto& ca = options.named.at("ca");
  if (ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions files;
  files.pem_root_certs = Read(ca);
  files.pem_cert_chain = Read(options.named.at("cert"));
  files.pem_private_key = Read(options.named.at("cert-key"));
  return grpc::SslCredentials(files);
}

// Encodes a BYTES tensor: the length of each element (4 bytes, little-endian), then the element.
std::string Packed(const std::vector<std::string>& texts) {
  std::string packed;
  for (const auto& text : texts) {
    const auto size = static_cast<std::uint32_t>(text.size());
    for (int shift = 0; shift < 32; shift += 8) packed.push_back(static_cast<char>(size >> shift));
    packed += text;
  }
  return packed;
}

double Likeness(const float* a, const float* b, std::int64_t size) {
  double dot = 0, aa = 0, bb = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return dot / std::sqrt(aa * bb);
}

int Run(const Options& options) {
  const auto channel = grpc::CreateChannel(options.named.at("address"), Credentials(options));
  const auto stub = inference::GRPCInferenceService::NewStub(channel);

  inference::ModelInferRequest request;
  request.set_model_name(options.named.at("model"));
  auto* input = request.add_inputs();
  input->set_name("text");
  input->set_datatype("BYTES");
  input->add_shape(static_cast<std::int64_t>(options.texts.size()));
  request.add_raw_input_contents(Packed(options.texts));

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const std::string key = Key(options.named.at("key-file"));
  if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);

  inference::ModelInferResponse answer;
  const grpc::Status status = stub->ModelInfer(&context, request, &answer);
  if (!status.ok()) {
    std::cerr << "refused (" << status.error_code() << "): " << status.error_message() << "\n";
    const auto& trailers = context.GetServerTrailingMetadata();
    const auto retry = trailers.find("retry-after");
    if (retry != trailers.end()) std::cerr << "come back after " << retry->second << " s\n";
    return 1;
  }
  const auto& shape = answer.outputs(0).shape();
  std::vector<float> numbers(answer.raw_output_contents(0).size() / sizeof(float));
  std::memcpy(numbers.data(), answer.raw_output_contents(0).data(), numbers.size() * sizeof(float));
  for (int row = 0; row < shape.Get(0); ++row) {
    const std::int64_t size = shape.Get(1);
    std::cout << Likeness(numbers.data(), numbers.data() + row * size, size) << "\t" << size << "\t"
              << options.texts[row] << "\n";
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(Parse(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
