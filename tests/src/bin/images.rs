//! `make images`: the three container images as OCI archives, each with its bill of materials, and how to bring them to a cluster.

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use truebeat_tests::images::release;
use truebeat_tests::product::Programs;

/// Makes the images of operator, agent and engine from the programs that are built.
#[derive(Debug, Parser)]
struct Args {
    /// Folder of the archives.
    #[arg(long, default_value = "target/images")]
    out: PathBuf,
    /// Registry and path, put before the names as it is: `registry.example/serving/`.
    #[arg(long, default_value = "")]
    prefix: String,
    #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
    tag: String,
}

fn main() -> Result<()> {
    let Args { out, prefix, tag } = Args::parse();
    let made = release::all(&Programs::find()?, &out, &prefix, &tag)?;
    for image in &made {
        let mib = image.archive.metadata()?.len() >> 20;
        println!(
            "{}\n  {} ({mib} MiB), {}\n  {}",
            image.name,
            image.archive.display(),
            image.digest,
            image.bill.display()
        );
    }
    println!("\nTo a registry: skopeo copy oci-archive:ARCHIVE docker://NAME");
    println!(
        "To one machine: ctr --namespace k8s.io images import ARCHIVE (containerd), kind load image-archive ARCHIVE (kind)"
    );
    Ok(())
}
