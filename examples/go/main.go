// Quire over gRPC from Go: a text, a durable stream that survives its gateway, and errors with their details.
//
// usage: client HOST:PORT [KEY]
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	commonv1 "quire/common/v1"
	gatewayv1 "quire/gateway/v1"
)

const prompt = "Once upon a time"

// The text has characters of one to four bytes.
var emoji = &commonv1.Constraint{Kind: &commonv1.Constraint_Regex{Regex: "(é [a-z]{2} 🦊 ){12}"}}

func ptr[T any](value T) *T { return &value }

func sampling(temperature float32) *commonv1.SamplingParameters {
	return &commonv1.SamplingParameters{Temperature: &temperature, Constraint: emoji}
}

func generate(ctx context.Context, client gatewayv1.GenerationServiceClient, temperature float32) (string, error) {
	request := &gatewayv1.GenerateRequest{
		Prompt:   &gatewayv1.GenerateRequest_Text{Text: prompt},
		Sampling: sampling(temperature),
	}
	// Waits for a connection instead of failing at once; the deadline of the context bounds it.
	response, err := client.Generate(ctx, request, grpc.WaitForReady(true))
	if err != nil {
		return "", err
	}
	return response.Sequences[0].Text, nil
}

// What the client has of the text. Offsets count tokens, and Unicode code points: runes, not bytes.
type held struct {
	text   string
	tokens uint32
}

type event interface {
	GetChunk() *gatewayv1.TokenChunk
	GetCompleted() *gatewayv1.RequestCompleted
}

// Reads a stream to its end or its failure.
func (h *held) read(receive func() (event, error)) error {
	for {
		event, err := receive()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if chunk := event.GetChunk(); chunk != nil {
			h.text += chunk.Text
			h.tokens += uint32(len(chunk.TokenIds))
			fmt.Fprintln(os.Stderr, "tokens:", h.tokens)
		}
	}
}

// A stream that continues through another gateway when its own is lost.
func stream(ctx context.Context, client gatewayv1.GenerationServiceClient) (text string, resumed int, err error) {
	request := &gatewayv1.GenerateStreamRequest{
		Prompt:   &gatewayv1.GenerateStreamRequest_Text{Text: prompt},
		Sampling: sampling(0),
		Durable:  ptr(true),
	}
	var h held
	first, err := client.GenerateStream(ctx, request, grpc.WaitForReady(true))
	if err != nil {
		return "", 0, err
	}
	header, err := first.Header()
	if err != nil {
		return "", 0, err
	}
	id := header.Get("quire-request-id")[0]
	err = h.read(func() (event, error) { return first.Recv() })
	for status.Code(err) == codes.Unavailable {
		resumed++
		time.Sleep(100 * time.Millisecond)
		offset := &gatewayv1.SequenceOffset{
			Offset: h.tokens, NumCharacters: ptr(uint32(utf8.RuneCountInString(h.text))),
		}
		resume := &gatewayv1.ResumeStreamRequest{RequestId: id, Offsets: []*gatewayv1.SequenceOffset{offset}}
		again, e := client.ResumeStream(ctx, resume, grpc.WaitForReady(true))
		if err = e; err == nil {
			err = h.read(func() (event, error) { return again.Recv() })
		}
	}
	return h.text, resumed, err
}

// The reason in the details of an error, and the fields at fault. An error of gRPC itself has no details.
func describe(err error) string {
	failed := status.Convert(err)
	var text string
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			text += detail.Reason
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				text += " " + violation.Field
			}
		}
	}
	return text
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := gatewayv1.NewGenerationServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if len(os.Args) > 2 {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+os.Args[2])
	}

	text, err := generate(ctx, client, 0)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("text:", text)
	text, resumed, err := stream(ctx, client)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("stream:", text)
	fmt.Println("resumed:", resumed > 0)

	_, err = generate(ctx, client, -1)
	fmt.Println("refused:", describe(err))
	wrong := metadata.NewOutgoingContext(ctx, metadata.Pairs("authorization", "Bearer wrong"))
	_, err = generate(wrong, client, 0)
	fmt.Println("wrong key:", describe(err))
	soon, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = generate(soon, client, 0)
	fmt.Println("deadline:", status.Code(err) == codes.DeadlineExceeded)
	left, leave := context.WithCancel(ctx)
	time.AfterFunc(50*time.Millisecond, leave)
	_, err = generate(left, client, 0)
	fmt.Println("cancelled:", status.Code(err) == codes.Canceled)
}
