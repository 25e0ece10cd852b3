//! `tandem completions` and `tandem man`: shell completions and manual pages, from the same definitions as `--help`.

use clap::{Command, CommandFactory};

use crate::{Cli, Failure, output};

const COMPLETIONS: &str = "\
Examples:
  tandem completions bash > ~/.local/share/bash-completion/completions/tandem
  tandem completions zsh > ~/.zfunc/_tandem
  tandem completions fish > ~/.config/fish/completions/tandem.fish";

/// Print completions for a shell.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(after_help = COMPLETIONS)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

const MAN: &str = "\
Examples:
  tandem man | man -l -
  tandem man plan > ~/.local/share/man/man1/tandem-plan.1";

/// Print a manual page of the command or of a subcommand.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MAN)]
pub struct Man {
    /// The subcommand
    #[arg(value_name = "SUBCOMMAND")]
    subcommand: Option<String>,
}

/// Prints completions.
///
/// # Errors
/// None; the signature is that of all subcommands.
pub fn completions(args: &Completions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "tandem", &mut script);
    output::print_styled(&String::from_utf8_lossy(&script));
    Ok(())
}

/// Prints a manual page.
///
/// # Errors
/// [`Failure::Input`] if there is no such subcommand.
pub fn man(args: &Man) -> Result<(), Failure> {
    let mut tandem = Cli::command();
    tandem.build();
    let page = match &args.subcommand {
        None => tandem,
        Some(name) => subcommand(&tandem, name)?,
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page)
        .render(&mut text)
        .map_err(|error| Failure::Wrong(format!("the page cannot be made: {error}")))?;
    output::print_styled(&String::from_utf8_lossy(&text));
    Ok(())
}

fn subcommand(tandem: &Command, name: &str) -> Result<Command, Failure> {
    let known = || {
        tandem
            .get_subcommands()
            .filter(|known| !known.is_hide_set())
    };
    let found = known().find(|known| known.get_name() == name);
    let page = found.map(|found| {
        // The usual name of a subcommand's manual page.
        let name: &'static str = Box::leak(format!("tandem-{name}").into_boxed_str());
        found.clone().name(name).display_name(name)
    });
    page.ok_or_else(|| {
        let names: Vec<_> = known().map(Command::get_name).collect();
        Failure::Input(format!(
            "there is no subcommand {name:?}: give one of {}",
            names.join(", ")
        ))
    })
}
