package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

// Debian 12 has grpc-go 1.33 with golang/protobuf 1.3, which cannot write messages of today's protoc-gen-go. With a
// later grpc-go, from a module, this file is not needed.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(value interface{}) ([]byte, error) { return proto.Marshal(value.(proto.Message)) }

func (codec) Unmarshal(data []byte, value interface{}) error {
	return proto.Unmarshal(data, value.(proto.Message))
}

func init() { encoding.RegisterCodec(codec{}) }
