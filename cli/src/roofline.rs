//! `tandem roofline`: draws measured points below the ceilings.

use std::path::PathBuf;

use crate::{
    Failure,
    bench::ResultFile,
    output::{self, Files, Force},
    picture,
    table::counted,
};

const EXAMPLES: &str = "\
Example:
  tandem bench --suite decode --json decode.json
  tandem roofline decode.json --svg decode.svg";

/// Draw results below the ceilings that were measured with them.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A file that `tandem bench --json` wrote
    #[arg(value_name = "RESULTS.json")]
    results: PathBuf,
    /// File for the picture
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
    #[command(flatten)]
    force: Force,
}

/// Runs the subcommand.
///
/// # Errors
/// Wrong input, or a picture that cannot be written.
pub fn run(args: &Args) -> Result<(), Failure> {
    let files = Files::new().reads([&args.results]).writes([&args.svg]);
    files.check(args.force)?;
    let file = ResultFile::load(&args.results)?;
    let points = picture::points(&file);
    if points == 0 {
        return Err(Failure::Input(format!(
            "{} has no measured times and operations to draw",
            args.results.display()
        )));
    }
    output::write_file(&args.svg, picture::roofline(&file).as_bytes())?;
    output::print(&format!(
        "{} in {}\n",
        counted(points, "point"),
        args.svg.display()
    ));
    Ok(())
}
