//! Decodes all entries of a PTX file and lists what is not supported.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: check FILE.ptx")?;
    let text = std::fs::read_to_string(path)?;
    let module = ptx_run::Module::parse(&text)?;
    let mut instructions = 0;
    for entry in module.entries() {
        match module.check(&entry.name) {
            Ok(count) => instructions += count,
            Err(error) => println!("{}: {error}", entry.name),
        }
    }
    println!("{instructions} instructions");
    Ok(())
}
