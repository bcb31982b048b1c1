// Quire over gRPC from C++: a text, a durable stream that survives its gateway, and errors with their details.
//
// usage: client HOST:PORT [KEY]
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "quire/gateway/v1/generation.grpc.pb.h"

namespace common = quire::common::v1;
namespace gateway = quire::gateway::v1;
using Stub = gateway::GenerationService::Stub;
using std::chrono::milliseconds;

namespace {

constexpr char kPrompt[] = "Once upon a time";

std::string key;

std::unique_ptr<grpc::ClientContext> NewContext(milliseconds timeout = std::chrono::minutes(1)) {
  auto context = std::make_unique<grpc::ClientContext>();
  if (!key.empty()) context->AddMetadata("authorization", "Bearer " + key);
  context->set_deadline(std::chrono::system_clock::now() + timeout);
  // Waits for a connection instead of failing at once: after a gateway's death gRPC takes a second to reconnect.
  context->set_wait_for_ready(true);
  return context;
}

common::SamplingParameters Sampling(float temperature) {
  common::SamplingParameters sampling;
  sampling.set_temperature(temperature);
  // The text has characters of one to four bytes.
  sampling.mutable_constraint()->set_regex("(é [a-z]{2} 🦊 ){12}");
  return sampling;
}

grpc::Status Generate(Stub& stub, grpc::ClientContext& context, float temperature, std::string* text = nullptr) {
  gateway::GenerateRequest request;
  gateway::GenerateResponse response;
  request.set_text(kPrompt);
  *request.mutable_sampling() = Sampling(temperature);
  const grpc::Status status = stub.Generate(&context, request, &response);
  if (status.ok() && text != nullptr) *text = response.sequences(0).text();
  return status;
}

// What the client has of a stream's text.
struct Held {
  std::string text;
  unsigned tokens = 0;

  template <typename Response>
  grpc::Status Read(grpc::ClientReader<Response>& reader) {
    Response response;
    while (reader.Read(&response)) {
      if (!response.has_chunk()) continue;
      text += response.chunk().text();
      tokens += response.chunk().token_ids_size();
      std::cerr << "tokens: " << tokens << std::endl;
    }
    return reader.Finish();
  }

  // Unicode code points: the bytes that do not continue a character.
  unsigned num_characters() const {
    return std::count_if(text.begin(), text.end(), [](unsigned char byte) { return (byte & 0xC0) != 0x80; });
  }
};

// A stream that continues through another gateway when its own is lost.
grpc::Status Stream(Stub& stub, std::string* text, int* resumed) {
  gateway::GenerateStreamRequest request;
  request.set_text(kPrompt);
  *request.mutable_sampling() = Sampling(0);
  request.set_durable(true);
  Held held;
  auto context = NewContext();
  auto first = stub.GenerateStream(context.get(), request);
  first->WaitForInitialMetadata();
  const auto& metadata = context->GetServerInitialMetadata();
  const auto found = metadata.find("quire-request-id");
  const std::string id = found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
  grpc::Status status = held.Read(*first);
  for (*resumed = 0; status.error_code() == grpc::StatusCode::UNAVAILABLE; ++*resumed) {
    std::this_thread::sleep_for(milliseconds(100));
    gateway::ResumeStreamRequest resume;
    resume.set_request_id(id);
    auto* offset = resume.add_offsets();
    offset->set_offset(held.tokens);
    offset->set_num_characters(held.num_characters());
    auto again = NewContext();
    status = held.Read(*stub.ResumeStream(again.get(), resume));
  }
  *text = held.text;
  return status;
}

// The reason in the details of an error, and the fields at fault.
std::string Describe(const grpc::Status& status) {
  google::rpc::Status details;
  std::string text;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad_request;
    if (detail.UnpackTo(&info)) text += info.reason();
    if (detail.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) text += " " + violation.field();
    }
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) key = argv[2];
  Stub stub(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  std::string text;
  int resumed = 0;
  std::cout << std::boolalpha;

  grpc::Status status = Generate(stub, *NewContext(), 0, &text);
  std::cout << "text: " << text << "\n";
  if (status.ok()) status = Stream(stub, &text, &resumed);
  if (!status.ok()) {
    std::cerr << status.error_code() << ": " << status.error_message() << "\n";
    return 1;
  }
  std::cout << "stream: " << text << "\nresumed: " << (resumed > 0) << "\n";

  std::cout << "refused: " << Describe(Generate(stub, *NewContext(), -1)) << "\n";
  grpc::ClientContext wrong;
  wrong.AddMetadata("authorization", "Bearer wrong");
  std::cout << "wrong key: " << Describe(Generate(stub, wrong, 0)) << "\n";
  status = Generate(stub, *NewContext(milliseconds(50)), 0);
  std::cout << "deadline: " << (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) << "\n";
  auto left = NewContext();
  std::thread leaving([&left] {
    std::this_thread::sleep_for(milliseconds(50));
    left->TryCancel();
  });
  status = Generate(stub, *left, 0);
  leaving.join();
  std::cout << "cancelled: " << (status.error_code() == grpc::StatusCode::CANCELLED) << "\n";
}
