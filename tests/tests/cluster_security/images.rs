//! S5: what is in the images, and that the same inputs are the same image.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use truebeat_tests::images::{self, read::Image, release, sbom};
use truebeat_tests::product::OPERATOR_IMAGE;

use crate::world::World;

const BYTES_MAX: usize = 15 << 20;
/// Program header of an ELF file that asks for a loader.
const PT_INTERP: u32 = 3;

/// From scratch: one static program, no shell, no library, nobody's rights but the caller's, and nothing that depends on when it was made.
pub fn operator(world: &World<'_>) -> Result<()> {
    let make = |folder: &str| -> Result<Image> {
        let out = world.cluster.layout().path(&format!("images/{folder}"));
        std::fs::create_dir_all(&out)?;
        let binary = &world.programs.operator;
        Image::open(&images::image_static(&out, OPERATOR_IMAGE, binary, &["/truebeat-operator"], &[])?)
    };
    let (image, again) = (make("s05-a")?, make("s05-b")?);
    ensure!(image.digest == again.digest, "the same inputs gave {} and {}", image.digest, again.digest);
    ensure!(image.config["config"]["Entrypoint"] == json!(["/truebeat-operator"]), "{}", image.config);
    ensure!(image.config.get("created").is_none(), "the image tells when it was made");
    let [program] = image.entries.as_slice() else {
        let names: Vec<&str> = image.entries.iter().map(|entry| entry.path.as_str()).collect();
        anyhow::bail!("more than a program is in the image: {names:?}");
    };
    ensure!(
        program.path == "truebeat-operator" && program.mode == 0o755,
        "{} has mode {:o}",
        program.path,
        program.mode
    );
    ensure!(program.bytes.len() <= BYTES_MAX, "{} bytes", program.bytes.len());
    ensure!(!interpreted(&program.bytes).context("no ELF program")?, "the program asks for a loader: it is not static");
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let bill: Value = serde_json::from_str(&sbom::bill("operator", &target, &image.digest, &[])?)?;
    let parts = bill["components"].as_array().context("components")?.len();
    ensure!(bill["metadata"]["component"]["bom-ref"] == json!(image.digest) && parts > 0, "{}", bill["metadata"]);
    println!("      {} MiB, {parts} parts, {}", program.bytes.len() >> 20, image.digest);
    Ok(())
}

/// What `make images` makes: everything in an image is in its bill, nothing has rights of its own, and twice is the same.
pub fn bills(world: &World<'_>) -> Result<()> {
    let make = |folder: &str| {
        release::all(
            &world.programs,
            &world.cluster.layout().path(&format!("images/{folder}")),
            "registry.example/",
            "1",
        )
    };
    let (made, again) = (make("s05-all")?, make("s05-again")?);
    ensure!(made.len() == 3, "{made:?}");
    for (image, twin) in made.iter().zip(&again) {
        ensure!(image.digest == twin.digest, "the same inputs gave {} and {}", image.digest, twin.digest);
        let bill: Value = serde_json::from_slice(&std::fs::read(&image.bill)?)?;
        ensure!(bill["metadata"]["component"]["bom-ref"] == json!(image.digest), "the bill is another image's");
        let parts = bill["components"].as_array().context("components")?;
        let content = Image::open(&image.archive)?;
        ensure!(content.config.get("created").is_none(), "the image tells when it was made");
        let files = content.entries.iter().filter(|entry| !entry.folder);
        let mut strangers = Vec::new();
        for file in files {
            ensure!(file.mode & 0o7000 == 0, "{} has mode {:o}", file.path, file.mode);
            let known = |part: &Value| {
                part["name"] == json!(file.path) && part["hashes"][0]["content"] == json!(sum(&file.bytes))
            };
            strangers.extend((!parts.iter().any(known)).then_some(file.path.as_str()));
        }
        // the program itself is what the crates of the bill are linked into
        ensure!(strangers.len() == 1 && strangers.iter().all(|path| path.starts_with("truebeat-")), "{strangers:?}");
        println!("      {}: {} parts", image.name, parts.len());
    }
    Ok(())
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Does a 64-bit little-endian ELF program name a loader? `None`: it is none.
fn interpreted(elf: &[u8]) -> Option<bool> {
    let number = |at: usize, bytes: usize| {
        let field = elf.get(at..at + bytes)?;
        Some(field.iter().rev().fold(0_usize, |value, byte| value << 8 | usize::from(*byte)))
    };
    elf.starts_with(b"\x7fELF\x02\x01").then_some(())?;
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let mut kinds = (0..count).map(|n| number(table + n * size, 4));
    Some(kinds.any(|kind| kind == usize::try_from(PT_INTERP).ok()))
}
