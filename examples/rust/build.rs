fn main() -> std::io::Result<()> {
    let protos = std::env::var("QUIRE_PROTOS").expect("QUIRE_PROTOS is the folder protos/ of the repository");
    let examples = format!("{protos}/../examples");
    prost_build::Config::new().compile_protos(
        &["quire/gateway/v1/generation.proto", "google/rpc/error_details.proto"],
        &[protos, examples],
    )
}
