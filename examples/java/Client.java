// Quire over gRPC from Java: a text, a durable stream that survives its gateway, and errors with their details.
//
// usage: client HOST:PORT [KEY]
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import quire.common.v1.Constraint;
import quire.common.v1.SamplingParameters;
import quire.gateway.v1.GenerateRequest;
import quire.gateway.v1.GenerateStreamRequest;
import quire.gateway.v1.GenerateStreamResponse;
import quire.gateway.v1.GenerationServiceGrpc;
import quire.gateway.v1.GenerationServiceGrpc.GenerationServiceBlockingStub;
import quire.gateway.v1.ResumeStreamRequest;
import quire.gateway.v1.ResumeStreamResponse;
import quire.gateway.v1.SequenceOffset;
import quire.gateway.v1.TokenChunk;

public final class Client {
  private static final String PROMPT = "Once upon a time";
  private static final Metadata.Key<String> AUTHORIZATION = header("authorization");
  private static final Metadata.Key<String> REQUEST_ID = header("quire-request-id");

  /** What the client has of a stream's text. */
  private final StringBuilder text = new StringBuilder();
  private int tokens;

  private static Metadata.Key<String> header(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  private static ClientInterceptor withKey(String key) {
    Metadata metadata = new Metadata();
    metadata.put(AUTHORIZATION, "Bearer " + key);
    return MetadataUtils.newAttachHeadersInterceptor(metadata);
  }

  private static SamplingParameters sampling(float temperature) {
    // The text has characters of one to four bytes.
    Constraint constraint = Constraint.newBuilder().setRegex("(é [a-z]{2} 🦊 ){12}").build();
    return SamplingParameters.newBuilder().setTemperature(temperature).setConstraint(constraint).build();
  }

  private static String generate(GenerationServiceBlockingStub stub, float temperature) {
    GenerateRequest request =
        GenerateRequest.newBuilder().setText(PROMPT).setSampling(sampling(temperature)).build();
    return stub.generate(request).getSequences(0).getText();
  }

  private void add(TokenChunk chunk) {
    text.append(chunk.getText());
    tokens += chunk.getTokenIdsCount();
    System.err.println("tokens: " + tokens);
  }

  /** Offsets count tokens, and Unicode code points: not the UTF-16 units of String.length(). */
  private SequenceOffset offset() {
    int numCharacters = text.codePointCount(0, text.length());
    return SequenceOffset.newBuilder().setOffset(tokens).setNumCharacters(numCharacters).build();
  }

  /** Reads a stream that continues through another gateway when its own is lost; returns how often it did. */
  private int stream(GenerationServiceBlockingStub stub) throws InterruptedException {
    AtomicReference<Metadata> headers = new AtomicReference<>();
    GenerateStreamRequest request =
        GenerateStreamRequest.newBuilder().setText(PROMPT).setSampling(sampling(0)).setDurable(true).build();
    ClientInterceptor capture = MetadataUtils.newCaptureMetadataInterceptor(headers, new AtomicReference<>());
    Iterator<GenerateStreamResponse> first = stub.withInterceptors(capture).generateStream(request);
    Iterator<ResumeStreamResponse> again = null;
    for (int resumed = 0; ; resumed++) {
      try {
        while (again == null && first.hasNext()) {
          GenerateStreamResponse response = first.next();
          if (response.hasChunk()) add(response.getChunk());
        }
        while (again != null && again.hasNext()) {
          ResumeStreamResponse response = again.next();
          if (response.hasChunk()) add(response.getChunk());
        }
        return resumed;
      } catch (StatusRuntimeException error) {
        if (error.getStatus().getCode() != Status.Code.UNAVAILABLE) throw error;
        Thread.sleep(100);
        String id = headers.get().get(REQUEST_ID);
        again = stub.resumeStream(ResumeStreamRequest.newBuilder().setRequestId(id).addOffsets(offset()).build());
      }
    }
  }

  /** The error of a call that fails. */
  private static StatusRuntimeException failure(Runnable call) {
    try {
      call.run();
    } catch (StatusRuntimeException error) {
      return error;
    }
    throw new IllegalStateException("the call was answered");
  }

  /** The reason in the details of an error, and the fields at fault. */
  private static String describe(StatusRuntimeException error) throws InvalidProtocolBufferException {
    List<String> parts = new ArrayList<>();
    for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(ErrorInfo.class)) parts.add(detail.unpack(ErrorInfo.class).getReason());
      if (detail.is(BadRequest.class)) {
        detail.unpack(BadRequest.class).getFieldViolationsList().forEach(each -> parts.add(each.getField()));
      }
    }
    return String.join(" ", parts);
  }

  public static void main(String[] arguments) throws Exception {
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    // Calls wait for a connection instead of failing at once.
    GenerationServiceBlockingStub open = GenerationServiceGrpc.newBlockingStub(channel).withWaitForReady();
    GenerationServiceBlockingStub keyed = arguments.length > 1 ? open.withInterceptors(withKey(arguments[1])) : open;
    GenerationServiceBlockingStub stub = keyed.withDeadlineAfter(60, TimeUnit.SECONDS);

    out.println("text: " + generate(stub, 0));
    Client client = new Client();
    int resumed = client.stream(stub);
    out.println("stream: " + client.text);
    out.println("resumed: " + (resumed > 0));
    out.println("refused: " + describe(failure(() -> generate(stub, -1))));
    out.println("wrong key: " + describe(failure(() -> generate(open.withInterceptors(withKey("wrong")), 0))));
    StatusRuntimeException late =
        failure(() -> generate(keyed.withDeadlineAfter(50, TimeUnit.MILLISECONDS), 0));
    out.println("deadline: " + (late.getStatus().getCode() == Status.Code.DEADLINE_EXCEEDED));
    Context.CancellableContext context = Context.current().withCancellation();
    var timer = Executors.newSingleThreadScheduledExecutor();
    timer.schedule(() -> context.cancel(null), 50, TimeUnit.MILLISECONDS);
    StatusRuntimeException left = failure(() -> context.run(() -> generate(stub, 0)));
    out.println("cancelled: " + (left.getStatus().getCode() == Status.Code.CANCELLED));
    timer.shutdown();
    channel.shutdownNow();
  }
}
