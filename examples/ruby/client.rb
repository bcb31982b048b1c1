# Quire over gRPC from Ruby: a text, a durable stream that survives its gateway, and errors with their details.
#
# usage: client HOST:PORT [KEY]
require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "google/rpc/status_pb"
require "quire/gateway/v1/generation_services_pb"

# Short names of the generated modules.
Common = Quire::Common::V1
Gateway = Quire::Gateway::V1

PROMPT = "Once upon a time".freeze

def sampling(temperature)
  # The text has characters of one to four bytes.
  Common::SamplingParameters.new(temperature: temperature, constraint: { regex: "(é [a-z]{2} 🦊 ){12}" })
end

def generate(stub, temperature, **options)
  request = Gateway::GenerateRequest.new(text: PROMPT, sampling: sampling(temperature))
  stub.generate(request, deadline: Time.now + 60, **options).sequences.first.text
end

# Reads a stream; raises GRPC::Unavailable when the gateway is lost.
def read(responses, held)
  responses.each do |response|
    next unless response.chunk

    held[:text] += response.chunk.text
    held[:tokens] += response.chunk.token_ids.size
    warn "tokens: #{held[:tokens]}"
  end
end

# A stream that continues through another gateway when its own is lost. The option wait_for_ready is not there in Ruby:
# while no gateway can be reached a call fails with UNAVAILABLE, and the loop tries again.
def stream(stub, metadata)
  held = { text: "", tokens: 0 }
  resumed = 0
  request = Gateway::GenerateStreamRequest.new(text: PROMPT, sampling: sampling(0), durable: true)
  operation = stub.generate_stream(request, metadata: metadata, return_op: true)
  responses = operation.execute
  begin
    read(responses, held)
  rescue GRPC::Unavailable
    id = operation.metadata && operation.metadata["quire-request-id"]
    raise if id.nil? || resumed > 100

    resumed += 1
    sleep 0.1
    # Offsets count tokens, and Unicode code points, as String#length does.
    offset = Gateway::SequenceOffset.new(offset: held[:tokens], num_characters: held[:text].length)
    resume = Gateway::ResumeStreamRequest.new(request_id: id, offsets: [offset])
    responses = stub.resume_stream(resume, metadata: metadata)
    retry
  end
  [held[:text], resumed]
end

# The error of a call that fails.
def failure
  yield
  raise "the call was answered"
rescue GRPC::BadStatus => error
  error
end

# The reason in the details of an error, and the fields at fault.
def describe(error)
  error.to_rpc_status.details.flat_map do |detail|
    if (info = detail.unpack(Google::Rpc::ErrorInfo))
      [info.reason]
    elsif (bad_request = detail.unpack(Google::Rpc::BadRequest))
      bad_request.field_violations.map(&:field)
    else
      []
    end
  end.join(" ")
end

address, key = ARGV
stub = Gateway::GenerationService::Stub.new(address, :this_channel_is_insecure)
metadata = key ? { "authorization" => "Bearer #{key}" } : {}

puts "text: #{generate(stub, 0, metadata: metadata)}"
text, resumed = stream(stub, metadata)
puts "stream: #{text}"
puts "resumed: #{resumed.positive?}"
puts "refused: #{describe(failure { generate(stub, -1, metadata: metadata) })}"
puts "wrong key: #{describe(failure { generate(stub, 0, metadata: { "authorization" => "Bearer wrong" }) })}"
late = failure { generate(stub, 0, metadata: metadata, deadline: Time.now + 0.05) }
puts "deadline: #{late.is_a?(GRPC::DeadlineExceeded)}"
request = Gateway::GenerateRequest.new(text: PROMPT, sampling: sampling(0))
operation = stub.generate(request, metadata: metadata, return_op: true)
Thread.new { sleep 0.05; operation.cancel }
puts "cancelled: #{failure { operation.execute }.is_a?(GRPC::Cancelled)}"
